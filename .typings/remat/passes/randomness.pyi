from passes.randomness import *
