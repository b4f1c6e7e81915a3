from api.views.figure import *
