from api.views.text import *
