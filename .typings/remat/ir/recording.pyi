from ir.recording import *
