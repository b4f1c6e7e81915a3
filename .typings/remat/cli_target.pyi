from api.cli_target import *
