from api.views.groups import *
