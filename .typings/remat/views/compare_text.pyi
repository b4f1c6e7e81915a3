from api.views.compare_text import *
