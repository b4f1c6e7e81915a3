from api.settings import *
