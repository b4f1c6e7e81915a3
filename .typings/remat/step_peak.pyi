from api.step_peak import *
