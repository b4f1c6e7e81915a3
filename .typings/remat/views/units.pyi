from api.views.units import *
