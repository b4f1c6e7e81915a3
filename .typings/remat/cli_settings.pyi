from api.cli_settings import *
