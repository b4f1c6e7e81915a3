from api.views.html_text import *
