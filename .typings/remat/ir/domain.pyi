from ir.domain import *
