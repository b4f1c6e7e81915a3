from api.summary import *
