from passes.allocator_config import *
