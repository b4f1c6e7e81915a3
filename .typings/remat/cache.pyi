from api.cache import *
