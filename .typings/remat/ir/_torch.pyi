from ir._torch import *
