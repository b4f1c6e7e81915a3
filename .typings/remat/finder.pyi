from api.finder import *
