from ir.eager_kernels import *
