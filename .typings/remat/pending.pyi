from api.pending import *
