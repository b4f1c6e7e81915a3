from passes.eager import *
