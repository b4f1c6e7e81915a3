from api.assumed_loss import *
