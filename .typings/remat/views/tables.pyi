from api.views.tables import *
