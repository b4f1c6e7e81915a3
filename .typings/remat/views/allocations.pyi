from api.views.allocations import *
