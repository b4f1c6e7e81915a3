from passes.formula_solve import *
