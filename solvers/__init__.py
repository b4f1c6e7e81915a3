"""The rematerialization problem as plain integers, and the solvers that share one signature."""

from .brute_force import solve_brute_force
from .evaluate import Evaluation, evaluate
from .problem import BoundClass, Limits, Op, Problem, Solution, Status
from .windows import solve_windows

__all__ = [
    "BoundClass",
    "Evaluation",
    "Limits",
    "Op",
    "Problem",
    "Solution",
    "Status",
    "evaluate",
    "solve_brute_force",
    "solve_windows",
]
