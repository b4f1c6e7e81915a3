from ir.untouched import *
