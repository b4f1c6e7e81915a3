from api.out_of_memory import *
