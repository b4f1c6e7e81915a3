from passes.scratch import *
