from api.views.snapshot import *
