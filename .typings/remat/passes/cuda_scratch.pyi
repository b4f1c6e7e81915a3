from passes.cuda_scratch import *
