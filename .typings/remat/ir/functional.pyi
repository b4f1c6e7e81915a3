from ir.functional import *
