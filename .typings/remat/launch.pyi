from api.launch import *
