from api.runtime import *
