from api.planner import *
