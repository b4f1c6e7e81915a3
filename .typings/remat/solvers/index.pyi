from solvers.index import *
