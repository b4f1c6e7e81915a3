from api.views.mathml import *
