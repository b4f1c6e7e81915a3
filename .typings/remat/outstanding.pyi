from api.outstanding import *
