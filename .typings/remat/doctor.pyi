from api.doctor import *
