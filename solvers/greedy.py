"""Greedy rematerialization against the true peak: one eviction after the other, the best one first.

While the bytes exceed the budget, the execution at which they are highest is relieved: among the storages
alive there but not used, the one with the least price is dropped after its last read before and executed
again just before its next read. The price of a move is its cost over its gain:
    cost = cost of the ops executed again. An ancestor that is dead by then is either kept alive until then or
        executed again too, whichever is cheaper at the price paid last; a later repetition of the
        same op is merged with the new one by the same rule.
    gain = bytes · (weight of the executions during which they are freed), less the same for what is kept.
Weights are (bytes / peak)^exponent: multiplicative weights of the covering problem that the budget poses.
With a large exponent only the worst execution counts, with a small one a long life does.

Then every repetition that is no longer worth making is left out (`improve.drop_repetitions`). All of it is
run twice per exponent, first from a price of 0, so that everything is kept that can be, then from the price
at which the last run ended. Then parts of the cheapest schedule are done again, as long as that helps.

Ancestors: XLA's HloRematerialization walks the schedule and picks by bytes freed per cost; DTR (Kirisame et
al., ICLR 2021) evicts online. This one looks at the whole schedule, measures the exact bytes after every
move, prices what a move makes others keep, and evicts sets that share what they are computed from.

Not handled: a bound (it is 0), other orders of first executions.
"""

import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, product
from math import inf

from .decode import decode
from .evaluate import evaluate
from .greedy_moves import Moves
from .improve import drop_repetitions
from .index import Index, forced_bytes, index
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status
from .timeline import Timeline

EXPONENTS = (64.0, 16.0, 4.0, 256.0)
"""Two runs each."""
PARTS = (2, 4)
"""Parts of the schedule that are done again, one after the other."""
REDONE = 30_000
"""Ops in all the schedules of which a part is done again."""
MOVES = (8, 100)
"""Moves, per op and beyond, at which a run is given up: it moves bytes in circles."""
HOPELESS = 2.0
"""Times the cost of the best schedule so far at which a run is given up."""


def solve_greedy(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> Solution:
    """A schedule that fits the budget, by the best greedy policy known to us.

    Args:
        problem: what to solve.
        limits: the clock; the gap does not apply, because nothing is proven.
    """
    deadline = time.monotonic() + limits.time_s
    identity = tuple(range(len(problem.ops)))
    measured = evaluate(problem, identity)
    if measured.feasible:
        return Solution(Status.OPTIMAL, identity, 0, measured.peak, 0.0, problem.bound_class)
    if max(forced_bytes(problem)) > problem.budget:
        return Solution(Status.INFEASIBLE, (), 0, 0, float("inf"), problem.bound_class)
    table = index(problem)
    best = identity
    for schedule in greedy_schedules(problem, table, deadline):
        best = schedule
    return _solution(problem, table, best, late=time.monotonic() > deadline)


def greedy_schedules(
    problem: Problem,
    table: Index,
    deadline: float,
    exponents: Sequence[float] = EXPONENTS,
) -> Iterator[tuple[int, ...]]:
    """Feasible schedules, each cheaper than the one before; the search goes on while they are taken.

    Args:
        problem: what to solve.
        table: of the same ops.
        deadline: by `time.monotonic`.
        exponents: see above; in this order.
    """
    identity = tuple(range(len(problem.ops)))
    best, cost, price = identity, inf, 0.0
    for exponent in exponents:
        for start in dict.fromkeys((0.0, price)):
            if time.monotonic() > deadline:
                return
            run = _Run(problem, table, exponent, start, deadline, cost, identity)
            schedule, found = run.schedule()
            price = run.price if schedule else price
            if found < cost:
                best, cost = schedule, found
                yield schedule
    if best != identity:
        yield from redone(problem, table, best, deadline)


def redone(
    problem: Problem, table: Index, schedule: tuple[int, ...], deadline: float
) -> Iterator[tuple[int, ...]]:
    """Cheaper and cheaper schedules: a part of the repetitions is left out, and made up for.

    This is iterated greedy (Ruiz & Stützle, EJOR 2007) without randomness. It ends when no part can be done
    better.

    Args:
        problem: what to solve.
        table: of the same ops.
        schedule: where to start from; by any solver.
        deadline: by `time.monotonic`.
    """
    cost, price = float(evaluate(problem, schedule).cost), 0.0
    left = REDONE // len(problem.ops)
    for parts in PARTS:
        improved = True
        while improved:
            improved = False
            for exponent, warm, part in product(EXPONENTS[:2], (False, True), range(parts)):
                if left <= 0 or time.monotonic() > deadline:
                    return
                left -= 1
                start = price if warm else 0.0
                run = _Run(problem, table, exponent, start, deadline, cost, schedule)
                run.leave_out(part, parts)
                again, found = run.schedule()
                price = run.price if again else price
                if found < cost:
                    schedule, cost, improved = again, found, True
                    yield schedule


def _solution(
    problem: Problem, table: Index, schedule: tuple[int, ...], *, late: bool
) -> Solution:
    """The best schedule, or that of a run with eviction if there is none."""
    measured = evaluate(problem, schedule)
    if not measured.feasible:
        schedule = decode(problem, table, None, problem.budget)
        if schedule:
            schedule = drop_repetitions(problem, schedule)
            measured = evaluate(problem, schedule)
    if not measured.feasible:
        return Solution(Status.UNKNOWN, (), 0, 0, 0.0, problem.bound_class)
    status = Status.TIME_LIMIT if late else Status.FEASIBLE
    if not measured.cost:
        status = Status.OPTIMAL
    return Solution(status, schedule, measured.cost, measured.peak, 0.0, problem.bound_class)


class _Run:
    """One run: the timeline, and the price paid so far."""

    def __init__(
        self,
        problem: Problem,
        table: Index,
        exponent: float,
        price: float,
        deadline: float,
        known: float,
        schedule: tuple[int, ...],
    ) -> None:
        self.problem = problem
        self.table = table
        self.exponent = exponent
        self.price = price
        self.deadline = deadline
        self.start = schedule
        self.timeline = Timeline(problem, schedule)
        self.left = MOVES[0] * len(problem.ops) + MOVES[1]
        self.cost_left = HOPELESS * known

    def leave_out(self, part: int, parts: int) -> None:
        """Take out the repetitions of one of several parts of the schedule."""
        repeated = [x for x in self.timeline.order if not x.first]
        for x in repeated[part * len(repeated) // parts : (part + 1) * len(repeated) // parts]:
            self.timeline.remove(x)
        self.cost_left -= sum(
            self.problem.ops[x.op].cost for x in self.timeline.order if not x.first
        )

    def schedule(self) -> tuple[tuple[int, ...], float]:
        """The schedule that it comes to, and its cost; infinite if that does not fit or is the same again."""
        if not self.fits():
            return (), inf
        schedule = self.timeline.schedule()
        if schedule == self.start:
            return schedule, inf
        schedule = drop_repetitions(self.problem, schedule)
        measured = evaluate(self.problem, schedule)
        return schedule, float(measured.cost) if measured.feasible else inf

    def fits(self) -> bool:
        """Relieve the worst execution until there is none; False if one cannot be."""
        while True:
            used = self.timeline.bytes()
            worst = max(used)
            if worst <= self.problem.budget:
                return True
            weights = [(x / worst) ** self.exponent for x in used]
            scale = 1 / sum(weights)
            sums = list(accumulate((x * scale for x in weights), initial=0.0))
            execution = self.timeline.order[used.index(worst)]
            excess = worst - self.problem.budget
            moves = Moves(
                self.problem, self.table, self.timeline, sums, execution, excess, self.price
            )
            if not self.relieve(moves):
                return False
            self.price = moves.price

    def relieve(self, moves: Moves) -> bool:
        """Evict, the least price first, until the bytes at one execution fit."""
        queue: list[tuple[float, int]] = []
        for s in range(len(self.problem.sizes)):
            self.push(queue, moves, s)
        while moves.excess > 0:
            if not queue or not self.left or self.cost_left < 0:
                return False
            if time.monotonic() > self.deadline:
                return False
            _, s = heappop(queue)
            move = moves.move(s)
            if move is None:
                continue
            if queue and move.price > queue[0][0]:
                heappush(queue, (move.price, s))
                continue
            self.left -= 1
            self.cost_left -= move.cost
            moves.apply(move)
            if moves.excess <= 0:
                break
            ops, readers = self.problem.ops, self.table.readers
            again = [s for step in move.steps for v in step.ops for s in ops[v].writes]
            nearby = [x for s in again for c in readers[s] for x in ops[c].writes]
            for x in dict.fromkeys(nearby):
                self.push(queue, moves, x)
        return True

    def push(self, queue: list[tuple[float, int]], moves: Moves, s: int) -> None:
        """Queue a storage at the price of evicting it, if that is possible."""
        move = moves.move(s)
        if move is not None:
            heappush(queue, (move.price, s))
