from passes.expandable_segments import *
