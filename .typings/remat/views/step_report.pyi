from api.views.step_report import *
