from api.views.alignment import *
