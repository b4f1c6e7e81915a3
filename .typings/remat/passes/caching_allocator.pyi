from passes.caching_allocator import *
