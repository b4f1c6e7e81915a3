from api.global_state import *
