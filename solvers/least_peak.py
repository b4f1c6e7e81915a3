"""The least budget for which a schedule can be found.

Two searches over the budget, between the bytes that no schedule can avoid (`index.forced_bytes`) and the peak
of the program as it is:
    (1) a bisection whose steps run the program with eviction (`decode.py`); on joint graphs of transformers
        this reaches the lower end itself, so that one is tried first;
    (2) steps down from there by the greedy solver (`greedy.py`), which sees the whole schedule, and gets
        lower where the graph is no chain.

The answer is a schedule, not a proof: a smaller peak may exist unless the lower end was reached. The
problem's own budget is not looked at, and neither is the cost beyond the solvers' own preference.
"""

import time
from dataclasses import dataclass, replace

from .decode import decode
from .evaluate import evaluate
from .greedy import greedy_schedules
from .improve import drop_repetitions, prune
from .index import Index, forced_bytes, index
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status

EVICTION = 0.5
"""Share of the time limit by which (1) ends."""
EXPONENTS = (16.0, 4.0)
"""With which the greedy solver is run in (2)."""
FIRST = 8
"""(2) begins with a step of this part of what is left."""
SMALLEST = 32
"""(2) ends when a step of this part of what is left fails."""
WORTH = 100
"""(2) is left out, or ends, when what is left is less than the upper end over this."""
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
    begin = time.monotonic()
    search = _Search(problem, index(problem), tuple(range(len(problem.ops))))
    search.upper = evaluate(problem, search.schedule).peak
    search.lower = max(forced_bytes(problem), default=problem.resident)
    _bisect(search, begin + EVICTION * limits.time_s)
    _descend(search, begin + limits.time_s)
    final = drop_repetitions(replace(problem, budget=search.upper), search.schedule)
    measured = evaluate(problem, final)
    status = Status.TIME_LIMIT if search.timed_out else Status.FEASIBLE
    return Solution(status, final, measured.cost, measured.peak, 0.0, problem.bound_class)


@dataclass(slots=True)
class _Search:
    problem: Problem
    table: Index
    schedule: tuple[int, ...]
    """The one with the smallest peak so far."""
    upper: int = 0
    """Its peak, bytes."""
    lower: int = 0
    """Bytes; nothing fits less."""
    timed_out: bool = False

    def late(self, deadline: float) -> bool:
        """The clock has ended this part of the search."""
        self.timed_out = self.timed_out or time.monotonic() > deadline
        return time.monotonic() > deadline

    def offer(self, schedule: tuple[int, ...]) -> int:
        """Keep a schedule if its peak is smaller; returns the peak."""
        peak = evaluate(self.problem, schedule).peak
        if peak < self.upper:
            self.schedule, self.upper = schedule, peak
        return peak


def _bisect(search: _Search, deadline: float) -> None:
    """(1): a budget that eviction cannot keep raises the lower end of the bisection."""
    low = middle = search.lower
    while low < search.upper and not search.late(deadline):
        schedule = prune(search.problem, decode(search.problem, search.table, None, middle))
        if not schedule or search.offer(schedule) > middle:
            low = max(low, middle)
            if search.upper - low <= search.upper // RESOLUTION + 1:
                break
        middle = (low + search.upper) // 2


def _descend(search: _Search, deadline: float) -> None:
    """(2): by a share of what is left: doubled where a step succeeds, halved where it fails."""
    divisor = FIRST
    while search.upper - search.lower > search.upper // WORTH and divisor <= SMALLEST:
        now = time.monotonic()
        if search.late(deadline):
            return
        budget = search.upper - max(1, (search.upper - search.lower) // divisor)
        capped = replace(search.problem, budget=budget)
        runs = greedy_schedules(capped, search.table, now + (deadline - now) / 4, EXPONENTS)
        schedule = next(runs, ())
        if schedule:
            search.offer(schedule)
            divisor = max(2, divisor // 2)
        else:
            divisor *= 2
