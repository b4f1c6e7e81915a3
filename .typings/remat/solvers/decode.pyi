from solvers.decode import *
