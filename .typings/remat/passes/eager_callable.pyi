from passes.eager_callable import *
