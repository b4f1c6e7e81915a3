from api.views.html import *
