from passes.symbolic import *
