from ir.checkpoints import *
