from passes.device_memory import *
