from ir.origin import *
