from api.planned import *
