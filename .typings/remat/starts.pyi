from api.starts import *
