from api.cli import *
