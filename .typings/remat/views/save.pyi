from api.views.save import *
