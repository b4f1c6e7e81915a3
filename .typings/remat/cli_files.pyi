from api.cli_files import *
