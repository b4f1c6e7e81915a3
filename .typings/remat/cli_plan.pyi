from api.cli_plan import *
