from solvers.timeline import *
