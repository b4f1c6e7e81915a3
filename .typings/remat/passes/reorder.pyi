from passes.reorder import *
