from passes.memory import *
