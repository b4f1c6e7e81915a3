from passes.rounding import *
