from passes.rewrite import *
