from ir.autocast import *
