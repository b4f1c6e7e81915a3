from passes.devices import *
