from passes.prepare import *
