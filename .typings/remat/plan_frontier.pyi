from api.plan_frontier import *
