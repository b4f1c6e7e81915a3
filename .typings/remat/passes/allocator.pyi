from passes.allocator import *
