from solvers.window_model import *
