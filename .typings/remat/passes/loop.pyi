from passes.loop import *
