from api.request import *
