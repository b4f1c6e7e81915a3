from passes.composition import *
