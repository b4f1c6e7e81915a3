from api.backend import *
