from passes.split import *
