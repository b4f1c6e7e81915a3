from api import *
