from ir.structure import *
