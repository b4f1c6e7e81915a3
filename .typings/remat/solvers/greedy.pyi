from solvers.greedy import *
