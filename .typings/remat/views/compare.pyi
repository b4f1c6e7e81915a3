from api.views.compare import *
