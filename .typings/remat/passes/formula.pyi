from passes.formula import *
