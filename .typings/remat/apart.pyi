from api.apart import *
