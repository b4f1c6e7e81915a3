from api.replay import *
