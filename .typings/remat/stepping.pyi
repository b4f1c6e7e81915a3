from api.stepping import *
