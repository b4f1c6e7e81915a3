from api.views.diff import *
