from ir.device_kernels import *
