from api.cli_model import *
