from api.making import *
