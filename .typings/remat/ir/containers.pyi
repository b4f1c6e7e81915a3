from ir.containers import *
