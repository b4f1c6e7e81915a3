from api.measure import *
