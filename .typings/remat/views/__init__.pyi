from api.views import *
