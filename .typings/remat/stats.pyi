from api.stats import *
