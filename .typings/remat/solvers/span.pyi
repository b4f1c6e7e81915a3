from solvers.span import *
