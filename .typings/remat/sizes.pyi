from api.sizes import *
