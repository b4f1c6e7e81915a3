from passes.graph_data import *
