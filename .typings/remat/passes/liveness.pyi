from passes.liveness import *
