from api.identity import *
