"""A quick bound: what fitting the budget at the peak instant alone costs.

The window model with one instant, the one at which the program as it is takes the most. It serves to compare
orders of the same program before any is solved. Where the program fits, the bound is 0.
"""

from .evaluate import evaluate
from .index import index
from .problem import DEFAULT_LIMITS, Limits, Problem
from .window_model import build_model, solve_model

NODES = 200
"""Most branch-and-bound nodes."""


def peak_bound(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> float:
    """No schedule in this order that fits the budget costs less; infinite if it is proven that none fits."""
    measured = evaluate(problem, range(len(problem.ops)))
    if measured.feasible:
        return 0.0
    build = build_model(problem, index(problem), [measured.peak_at])
    return solve_model(build, gap=0.0, nodes=NODES, time_s=limits.time_s).bound
