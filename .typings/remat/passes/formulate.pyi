from passes.formulate import *
