from api.failure import *
