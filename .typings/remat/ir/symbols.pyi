from ir.symbols import *
