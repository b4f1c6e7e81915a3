"""The least budget for which a schedule can be found.

A bisection over the budget, between the bytes that no schedule can avoid (`index.forced_bytes`) and the
peak of the program as it is. Each step runs the program with eviction (`decode.py`) under the budget; on
joint graphs of transformers this reaches the lower end itself, so that one is tried first.

The answer is a schedule, not a proof: a smaller peak may exist unless the lower end was reached. The
problem's own budget is not looked at, and neither is the cost beyond the eviction's own preference.
"""

import time
from dataclasses import replace

from .decode import decode
from .evaluate import Evaluation, evaluate
from .improve import drop_repetitions, prune
from .index import Index, forced_bytes, index
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status

RESOLUTION = 500
"""The bisection stops when its ends are closer than the upper one over this."""


def least_peak(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> Solution:
    """A schedule with as small a peak as can be found, never above that of executing each op once.

    The schedule fits ``replace(problem, budget=solution.peak)``; give it to `solve_windows` as ``start``
    there, so that it has an answer whatever else it finds.

    Args:
        problem: its budget is ignored.
        limits: the clock; the gap does not apply.
    """
    deadline = time.monotonic() + limits.time_s
    table = index(problem)
    schedule = tuple(range(len(problem.ops)))
    upper = evaluate(problem, schedule).peak
    lower = max(forced_bytes(problem), default=problem.resident)
    middle = lower
    timed_out = False
    while lower < upper:
        timed_out = time.monotonic() > deadline
        if timed_out:
            break
        found, measured = _run(problem, table, middle)
        if found and measured.peak < upper:
            schedule, upper = found, measured.peak
        if measured.peak > middle or not found:
            lower = max(lower, middle)
            if upper - lower <= upper // RESOLUTION + 1:
                break
        middle = (lower + upper) // 2
    final = drop_repetitions(replace(problem, budget=upper), schedule)
    measured = evaluate(problem, final)
    status = Status.TIME_LIMIT if timed_out else Status.FEASIBLE
    return Solution(status, final, measured.cost, measured.peak, 0.0, problem.bound_class)


def _run(problem: Problem, table: Index, budget: int) -> tuple[tuple[int, ...], Evaluation]:
    """One run with eviction; its schedule is empty if it gave up."""
    schedule = prune(problem, decode(problem, table, None, budget))
    return schedule, evaluate(problem, schedule or range(len(problem.ops)))
