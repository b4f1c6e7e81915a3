from api.planned_tensors import *
