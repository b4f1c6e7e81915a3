from api.compare import *
