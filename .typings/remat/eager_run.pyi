from api.eager_run import *
