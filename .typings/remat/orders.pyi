from api.orders import *
