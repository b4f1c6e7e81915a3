from solvers.chain import *
