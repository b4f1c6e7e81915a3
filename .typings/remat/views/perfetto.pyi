from api.views.perfetto import *
