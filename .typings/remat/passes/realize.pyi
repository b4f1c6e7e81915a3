from passes.realize import *
