from ir.lift import *
