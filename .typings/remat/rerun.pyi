from api.rerun import *
