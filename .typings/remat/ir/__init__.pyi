from ir import *
