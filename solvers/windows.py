"""The default solver: incumbents, lazy windows, spans.

It finds the cheapest schedule that fits the budget, and a bound on what any schedule could cost.
    (1) Incumbents: greedy eviction against the true peak (`greedy.py`), nested recomputation along a chain
        of blocks (`chain.py`), eviction at run time (`decode.py`). They are there within seconds.
    (2) The model (`window_model.py`: variables, objective, constraints) enforces memory only at a few
        instants; at first the one where the most bytes are live. Its solution is run (`decode.py`) into
        a schedule, which the evaluator measures in exact integers. If it fits, it is an incumbent. If not,
        the instants where it does not are added, and (2) again. Between, the model is also solved at the
        same instants with its budget lowered by the excess, and each solution is run once more with eviction.
    (3) The incumbent is improved between pairs of instants (`span.py`).
The bound comes only from the model at the true budget, which every schedule satisfies. If it does not close,
but the model with stage rows (`stage_rows.py`) does, the answer is that bound, of its smaller class.

The search stops when cost and bound meet, up to the gap, or after a fixed amount of work; that depends on
the problem alone, so the same problem gives the same schedule, unless the clock aborts it.

Not handled: other orders of first executions.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from .chain import chain_schedules
from .decode import decode
from .evaluate import Evaluation, evaluate, excesses
from .greedy import greedy_schedules, redone
from .improve import drop_repetitions, prune
from .index import Index, forced_bytes, index
from .least_peak import least_peak
from .problem import DEFAULT_LIMITS, BoundClass, Limits, Problem, Solution, Status
from .span import improve_span
from .stage_rows import Rows, add_stage_rows
from .window_model import Answer, Windows, build_model, solve_model

ROUNDS = 12
"""Times that instants are added."""
SHRINKS = 4
"""Times that the budget is lowered in one round."""
NESTED = 0.12
"""Bound, as a fraction of the baseline cost, from which nested recomputation is tried first."""
LAST = 0.15
"""Share of the time limit for the schedule of least peak, where nothing else fits."""
INSTANTS = 3
"""Instants that are tried alone at first."""
NEW_INSTANTS = 3
"""Instants added in one round."""
NEW_ROWS = 6
"""Stage rows added in one round."""
SPANS = (64, 32, 16)
"""The program's length over that of the spans in which the incumbent is improved."""
LEAST_SPAN = 6
"""Ops of the shortest span."""
WORK = 1_000_000
"""Branch-and-bound nodes times variables of one solve, roughly."""
LOOSE = 0.02
"""Relative gap at which a solve stops that is made for its solution, not for its bound."""
FIRST = 0.2
"""Share of the time limit by which the first bound must be there."""
INCUMBENTS = 0.6
"""Share of the time limit by which the first schedules must be there."""
WINDOWS = 0.85
"""Share of the time limit by which instants are added."""
QUICK = 1
"""Schedules that the greedy solver is asked for at first."""
FAR = 0.03
"""Gap beyond which all incumbents are asked for before the model is."""
NEAR = 0.003
"""Relative gap at which the first solves stop."""
HOPELESS = 1.5
"""Times the incumbent's cost at which a run with eviction is given up."""
Watch = Callable[[float, float], None]
"""Is told of every better schedule and bound: cost of the schedule (infinite without one) and bound, both as
fractions of the baseline cost."""
NUMERIC = 1e-6
"""Fraction of the baseline cost that counts as equal: HiGHS's bounds are floating point."""


@dataclass(slots=True)
class _Search:
    """The best schedule and bound so far, and when to stop."""

    problem: Problem
    table: Index
    limits: Limits
    watch: Watch
    begin: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    """By `time.monotonic`: when the current part of the search must end."""
    schedule: tuple[int, ...] = ()
    cost: int = 0
    bound: float = 0.0
    staged_bound: float = 0.0
    """Of the class `BoundClass.STAGED`."""
    timed_out: bool = False
    """The clock has cut something short."""

    def offer(self, schedule: Iterable[int]) -> Evaluation | None:
        """Evaluate a schedule and keep it if it is feasible and the cheapest; None for an empty one."""
        schedule = prune(self.problem, tuple(schedule))
        if not schedule:
            return None
        found = evaluate(self.problem, schedule)
        if found.feasible and (not self.schedule or found.cost < self.cost):
            self.schedule, self.cost = schedule, found.cost
            self.tell()
        return found

    def tell(self) -> None:
        """Tell whoever watches what is known."""
        base = max(1, self.problem.baseline_cost)
        self.watch(self.cost / base if self.schedule else math.inf, self.bound / base)

    def closed(self) -> bool:
        """Cost and a bound agree, up to the gap."""
        return self._meets(self.bound) or self._meets(self.staged_bound)

    def _meets(self, bound: float) -> bool:
        allowed = max(self.limits.gap, NUMERIC) * self.problem.baseline_cost
        near = self.cost - bound <= allowed or self.cost <= math.ceil(bound - 1e-4)
        # A schedule that is cheaper than the bound of its class is not in the class.
        return bool(self.schedule) and near and bound <= self.cost + allowed

    def gap(self) -> float:
        """(cost - bound) as a fraction of the baseline cost; infinite without a schedule."""
        base = max(1, self.problem.baseline_cost)
        return (self.cost - self.bound) / base if self.schedule else math.inf

    def seconds_left(self) -> float:
        """Until the clock ends the current part of the search."""
        left = self.deadline - time.monotonic()
        self.timed_out = self.timed_out or left <= 0
        return left

    def until(self, share: float) -> None:
        """Begin a part of the search that may last until a share of the time limit."""
        self.deadline = self.begin + share * self.limits.time_s

    def solve(
        self, instants: list[int], budget: int, rows: Rows = (), *, loose: float = 0.0
    ) -> Answer:
        """The model at these instants and this budget; raises the bound if it proves one."""
        nodes = max(20, WORK // (len(instants) * len(self.problem.ops)))
        build = build_model(replace(self.problem, budget=budget), self.table, instants)
        add_stage_rows(build, rows)
        proves = budget == self.problem.budget and not rows
        answer = solve_model(
            build,
            gap=0.5 * self.limits.gap,
            nodes=nodes,
            time_s=self.seconds_left(),
            loose=loose if budget == self.problem.budget else LOOSE,
        )
        if proves and answer.bound > self.bound:
            self.bound = answer.bound
            self.tell()
        elif budget == self.problem.budget and not proves:
            self.staged_bound = max(self.staged_bound, answer.bound)
        self.timed_out = self.timed_out or answer.timed_out
        return answer

    def evict(self, windows: Windows | None, budget: int) -> None:
        """Offer a run with eviction."""
        most = HOPELESS * self.cost if self.schedule else math.inf
        self.offer(decode(self.problem, self.table, windows, budget, most))

    def solution(self) -> Solution:
        """What is known at the end."""
        if self.bound == float("inf") and not self.schedule:
            return Solution(Status.INFEASIBLE, (), 0, 0, self.bound, self.problem.bound_class)
        if not self.schedule:
            return Solution(Status.UNKNOWN, (), 0, 0, self.bound, self.problem.bound_class)
        schedule = drop_repetitions(self.problem, self.schedule)
        found = evaluate(self.problem, schedule)
        self.schedule, self.cost = schedule, found.cost
        status = Status.TIME_LIMIT if self.timed_out else Status.FEASIBLE
        if self.closed():
            status = Status.OPTIMAL
        bound, known = min(self.bound, found.cost), self.problem.bound_class
        if not self._meets(self.bound) and self._meets(self.staged_bound):
            bound, known = min(self.staged_bound, found.cost), BoundClass.STAGED
        return Solution(status, schedule, found.cost, found.peak, bound, known)


def solve_windows(
    problem: Problem,
    limits: Limits = DEFAULT_LIMITS,
    *,
    start: tuple[int, ...] = (),
    watch: Watch = lambda cost, bound: None,
) -> Solution:
    """Cheapest schedule that fits the budget.

    Args:
        problem: what to solve.
        limits: when to stop.
        start: a known schedule, used as the first incumbent if it fits; then there is always an answer.
        watch: follows the search; it must not raise.

    Raises:
        VerifyError: `start` is no schedule of this problem.
        SolverError: HiGHS gave up for a reason that is not a limit.
    """
    table = index(problem)
    search = _Search(problem, table, limits, watch)
    identity = search.offer(range(len(problem.ops)))
    if identity is None or identity.feasible:
        return search.solution()
    if max(forced_bytes(problem)) > problem.budget:
        search.bound = float("inf")
        return search.solution()
    search.offer(start)
    if search.closed():
        return search.solution()
    search.until(FIRST)
    instants = _first_instants(search, identity)
    if search.bound == float("inf"):
        return search.solution()
    search.until(INCUMBENTS)
    _incumbents(search)
    search.until(WINDOWS)
    if not search.closed():
        _add_instants(search, instants)
    search.until(1.0)
    if search.schedule and not search.closed():
        _offer_all(search, redone(problem, table, search.schedule, search.deadline))
        _improve_spans(search)
    return search.solution()


def _incumbents(search: _Search) -> None:
    """First schedules; the more is to be recomputed, the more likely it is that a chain gives the best."""
    problem, table = search.problem, search.table
    greedy = greedy_schedules(problem, table, search.deadline)
    chain = chain_schedules(problem, table, search.deadline)
    if search.bound > NESTED * problem.baseline_cost:
        _offer_all(search, chain)
    _offer_all(search, islice(greedy, QUICK))
    if search.gap() > FAR:
        _offer_all(search, chain)
        _offer_all(search, greedy)
    if not search.schedule:
        limits = replace(search.limits, time_s=LAST * search.limits.time_s)
        search.offer(least_peak(problem, limits).schedule)
    if not search.schedule:
        search.evict(None, problem.budget)  # one run takes no time worth looking at the clock


def _first_instants(search: _Search, identity: Evaluation) -> list[int]:
    """The instant that alone gives the best bound, of those where the program as it is takes the most."""
    used = identity.bytes
    apart = max(1, len(used) // 200)
    found: list[int] = []
    for t in sorted(range(len(used)), key=lambda t: (-used[t], t)):
        if used[t] <= search.problem.budget or len(found) == INSTANTS:
            break
        if all(abs(t - other) > apart for other in found):
            found.append(t)
    bounds = {t: search.solve([t], search.problem.budget, loose=NEAR).bound for t in found}
    return [max(found, key=lambda t: (bounds[t], used[t], -t))]


def _offer_all(search: _Search, schedules: Iterable[tuple[int, ...]]) -> None:
    """Offer schedules until cost and bound meet."""
    if search.closed():
        return
    for schedule in schedules:
        search.offer(schedule)
        if search.closed() or search.seconds_left() <= 0:
            return
    search.seconds_left()  # the clock may have ended the schedules


def _improve_spans(search: _Search) -> None:
    """Improve the incumbent between pairs of first executions, of several lengths, one after the other."""
    problem = search.problem
    n = len(problem.ops)
    for parts in SPANS:
        length = max(LEAST_SPAN, n // parts)
        for a in range(0, n - 1, length // 2):
            if search.seconds_left() <= 0:
                return
            b = min(a + length, n - 1)
            better = improve_span(problem, search.table, search.schedule, a, b, search.deadline)
            if better:
                search.offer(better)
        search.offer(drop_repetitions(problem, search.schedule))
        if search.closed():
            return


def _add_instants(search: _Search, instants: list[int]) -> None:
    """The outer loop: solve, decode, add the instants where the decoded schedule does not fit."""
    rows: Rows = ()
    changed = True
    for _ in range(ROUNDS):
        plain: tuple[int, ...] = ()
        if changed:
            plain = _lower_budget(search, instants)
        if rows and not search.closed() and search.seconds_left() > 0:
            windows = search.solve(instants, search.problem.budget, rows).windows
            plain = _offer(search, windows)[0] if windows else ()
        if search.closed() or search.seconds_left() <= 0 or not plain:
            return
        new, new_rows = _violated(search.problem, plain, instants)
        new_rows = tuple(row for row in new_rows if row not in rows)
        if not new and not new_rows:
            return
        changed = bool(new)
        instants = sorted({*instants, *new})
        rows = (*rows, *new_rows)


def _lower_budget(search: _Search, instants: list[int]) -> tuple[int, ...]:
    """Solve at the true budget, then at lower ones until a decoded schedule fits.

    Returns:
        The schedule decoded from the true budget; empty if there is none.
    """
    problem = search.problem
    budget = problem.budget
    true_schedule: tuple[int, ...] = ()
    for _ in range(SHRINKS):
        if search.seconds_left() <= 0:
            break
        answer = search.solve(instants, budget)
        if answer.windows is None:
            break
        plain, found = _offer(search, answer.windows)
        if not true_schedule:
            true_schedule = plain
        if found is None or found.feasible or search.closed():
            break
        if search.schedule and answer.bound >= (1 - LOOSE) * search.cost:
            break  # what it leads to is hardly better than what is known
        step = min(found.peak - problem.budget, problem.budget // 20)
        budget -= max(step, problem.budget // 500, 1)
    return true_schedule


def _offer(search: _Search, windows: Windows) -> tuple[tuple[int, ...], Evaluation | None]:
    """Decode without a budget, then, if that does not fit, repaired by eviction; None if it gave up."""
    plain = prune(search.problem, decode(search.problem, search.table, windows, None))
    found = search.offer(plain)
    if found is None or not found.feasible:
        search.evict(windows, search.problem.budget)
    return plain, found


def _violated(
    problem: Problem, schedule: tuple[int, ...], instants: list[int]
) -> tuple[list[int], Rows]:
    """Where a schedule exceeds the budget worst: instants and stage rows that the model lacks.

    An excess while an op is repeated counts for the first execution that follows, and for the one before:
    with both, the recomputation has a window of its own, and a row can look at it.
    """
    new: list[int] = []
    rows: list[tuple[int, int]] = []
    apart = max(1, len(problem.ops) // 100)
    for _, t, v in excesses(problem, schedule):
        if v < t:
            rows.append((t, v))
        if any(abs(t - other) <= apart for other in new):
            continue
        new += [x for x in ((t - 1, t) if v < t else (t,)) if x not in instants]
        if len(new) >= NEW_INSTANTS or len(rows) >= NEW_ROWS:
            break
    return new, tuple(rows[:NEW_ROWS])
