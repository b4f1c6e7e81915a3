from api.verify import *
