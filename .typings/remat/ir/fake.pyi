from ir.fake import *
