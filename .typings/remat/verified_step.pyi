from api.verified_step import *
