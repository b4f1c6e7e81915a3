from api.cli_analyze import *
