from api.distributed import *
