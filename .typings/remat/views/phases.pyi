from api.views.phases import *
