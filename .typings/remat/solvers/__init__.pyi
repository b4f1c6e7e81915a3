from solvers import *
