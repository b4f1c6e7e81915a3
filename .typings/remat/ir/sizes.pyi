from ir.sizes import *
