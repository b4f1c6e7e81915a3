from passes.scratch_fit import *
