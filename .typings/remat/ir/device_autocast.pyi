from ir.device_autocast import *
