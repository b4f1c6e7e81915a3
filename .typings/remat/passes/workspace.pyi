from passes.workspace import *
