from api.dropin import *
