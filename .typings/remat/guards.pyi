from api.guards import *
