from api.anew import *
