from ir.canonical import *
