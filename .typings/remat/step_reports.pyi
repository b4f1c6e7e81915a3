from api.step_reports import *
