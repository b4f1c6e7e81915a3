from api.views.recording import *
