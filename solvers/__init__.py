"""The rematerialization problem as plain integers, and the solvers that share one signature."""

from .any_order import any_order_bound
from .brute_force import any_order_optimum, solve_brute_force, staged_optimum
from .cp_sat import solve_cp_sat
from .evaluate import Evaluation, evaluate
from .greedy import solve_greedy
from .improve import drop_repetitions, prune
from .index import forced_bytes
from .least_peak import least_peak
from .order import order, permuted
from .problem import FORBIDDEN, BoundClass, Limits, Op, Problem, Solution, Status
from .windows import Watch, solve_windows

__all__ = [
    "FORBIDDEN",
    "BoundClass",
    "Evaluation",
    "Limits",
    "Op",
    "Problem",
    "Solution",
    "Status",
    "Watch",
    "any_order_bound",
    "any_order_optimum",
    "drop_repetitions",
    "evaluate",
    "forced_bytes",
    "least_peak",
    "order",
    "permuted",
    "prune",
    "solve_brute_force",
    "solve_cp_sat",
    "solve_greedy",
    "solve_windows",
    "staged_optimum",
]
