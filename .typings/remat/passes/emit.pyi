from passes.emit import *
