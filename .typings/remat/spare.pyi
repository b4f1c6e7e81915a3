from api.spare import *
