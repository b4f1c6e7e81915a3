from api.budget import *
