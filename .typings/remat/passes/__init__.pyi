from passes import *
