from ir.capture import *
