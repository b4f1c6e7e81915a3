from ir.in_place import *
