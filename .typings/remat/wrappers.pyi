from api.wrappers import *
