from api.launched import *
