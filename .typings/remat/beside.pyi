from api.beside import *
