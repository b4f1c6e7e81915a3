from passes.formula_text import *
