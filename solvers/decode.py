"""Run the program under a plan and a budget: which executions happen, in which order.

The program's ops run in order. A storage that is read and absent is recomputed then and there, with what
that needs (lazily, as DTR does: Kirisame et al., ICLR 2021). Two things make storages absent:
    (1) at each instant of the `Windows`, everything that they do not keep is dropped, and at each op what
        must be absent there;
    (2) while the bytes exceed the budget, the storage with the least h is dropped, where
        h = (cost to have it back) / (size · ops until it is read next);
        storages that nothing needs any more, or not before they are dropped under (1), go first.
What a first execution reads may be dropped with it, if it writes another storage in its place.
Without windows this is an offline variant of DTR; without a budget it is the plain decoding of a plan.

The bytes counted here are those of the storages present, which may be dead already, so they are never
less than the evaluator's, except where a held instance is doubled by a repetition. The evaluator decides.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from .index import Index
from .problem import Problem
from .window_model import Windows

LONGEST = (4, 4000)
"""Executions, per op and beyond, at which a run is given up: it evicts in circles."""
DEEPEST = 60
"""Recomputations of storages evicted during recomputation, nested, at which a run is given up."""
FARTHEST = 64
"""Absent ancestors that are looked at when the cost to have a storage back is estimated."""


class GaveUp(Exception):
    """The budget cannot be kept by this run."""


def decode(
    problem: Problem,
    table: Index,
    windows: Windows | None,
    budget: int | None,
    most: float = inf,
) -> tuple[int, ...]:
    """The schedule of such a run; empty if it cannot keep the budget.

    Args:
        problem: the ops and sizes; its own budget is not looked at.
        table: of the same ops.
        windows: what to drop where; None to drop for the budget alone.
        budget: bytes, None for no limit.
        most: cost of the repetitions at which the run is given up.
    """
    run = Run(problem, table, windows, budget)
    run.left = most
    try:
        for t in range(len(problem.ops)):
            run.first(t)
    except GaveUp:
        return ()
    return tuple(run.schedule)


def decode_span(
    problem: Problem,
    table: Index,
    windows: Windows,
    budget: int | None,
    start: Iterable[int],
    most: float = inf,
) -> tuple[int, ...]:
    """The executions after the first instant and up to the last, which is included.

    Args:
        problem: the ops and sizes.
        table: of the same ops.
        budget: bytes, None for no limit.
        windows: what to drop where; it drops nothing at the first instant.
        start: storages present after the first instant.
        most: as for `decode`.
    """
    run = Run(problem, table, windows, budget)
    run.left = most
    first, last = windows.instants[0], windows.instants[-1]
    run.now, run.window = first + 1, 0
    run.present.update(dict.fromkeys(start))
    run.used += sum(problem.sizes[s] for s in run.present)
    run.enqueue(run.present)
    try:
        for t in range(first + 1, last + 1):
            run.first(t)
    except GaveUp:
        return ()
    return tuple(run.schedule)


class Run:
    """What is present while the program runs."""

    def __init__(
        self, problem: Problem, table: Index, windows: Windows | None, budget: int | None
    ) -> None:
        """Nothing has been executed; the arguments are those of `decode`."""
        self.problem = problem
        self.table = table
        self.windows = windows or Windows((), (), ())
        self.budget = budget
        self.schedule: list[int] = []
        self.present: dict[int, None] = {}
        """Storages; a dict, because it keeps the order in which they were written."""
        self.used = problem.resident
        """Bytes of the storages present, and the resident ones."""
        self.left: float = inf
        """Cost of further repetitions at which the run is given up."""
        self.now = 0
        """Op whose first execution runs or comes next."""
        self.window = -1
        """Index of the last instant that has passed."""
        self.queue: list[tuple[float, int]] = []
        """A heap of (h, storage) of what may be dropped; h may have grown since it was queued."""
        self.freed: dict[int, list[int]] = {}
        """Per op: the storages that are held until its first execution."""
        for s, held in enumerate(problem.held):
            self.freed.setdefault(held, []).append(s)
        self.banned = frozenset(s for op in problem.ops for s in op.absent)
        """Storages that must be absent at some op."""
        self.repeatable = [self._may_repeat(v) for v in range(len(problem.ops))]

    def _may_repeat(self, v: int) -> bool:
        """A random op is repeated only where the plan says so, or its state takes less than it frees."""
        op = self.problem.ops[v]
        if not op.candidate or op.state is None:
            return op.candidate
        if self.windows.instants:
            return any(v in again for again in self.windows.repeated)
        if not self.banned.isdisjoint(op.writes):
            return True
        return self.problem.sizes[op.state] < sum(self.problem.sizes[s] for s in op.writes)

    def first(self, t: int) -> None:
        """Execute op t for the first time, then drop what the plan drops there."""
        self.now = t
        at = bisect_left(self.windows.instants, t)
        instant = self.windows.instants[at : at + 1] == (t,)
        if instant and at > 0:
            again = self.windows.repeated[at - 1]
            writer = self.table.writer
            wanted = [s for s in sorted(self.windows.kept[at]) if writer[s] in again]
            self.ensure([*wanted, *self.problem.ops[t].reads], (), 0)
        self.execute(t, (), 0)
        self.now = t + 1
        op = self.problem.ops[t]
        for s in op.absent:
            if s in self.present:
                self.drop(s)
        self.enqueue((*op.reads, *op.writes, *self.freed.get(t, ())))
        if instant:
            self.window = at
            for s in list(self.present):
                # Of size 0, or the state of an op that is not in the plan: nothing to gain.
                if self.problem.sizes[s] and s not in self.windows.kept[at]:
                    self.drop(s)
            self.queue.clear()
            self.enqueue(self.present)

    def ensure(self, wanted: Iterable[int], pinned: tuple[int, ...], depth: int) -> None:
        """Recompute the absent ones of `wanted`, in program order, and keep them until the last is there."""
        absent = [s for s in wanted if s not in self.present]
        if not absent:
            return
        if depth > DEEPEST:
            raise GaveUp
        ops: set[int] = set()
        while absent:
            v = self.table.writer[absent.pop()]
            if v in ops:
                continue
            if not self.repeatable[v]:
                raise GaveUp
            ops.add(v)
            absent += [s for s in self._reads_again(v) if s not in self.present]
        pins = (*pinned, *wanted)
        for v in sorted(ops):
            self.execute(v, pins, depth + 1)

    def _reads_again(self, v: int) -> tuple[int, ...]:
        op = self.problem.ops[v]
        return op.reads if op.state is None else (*op.reads, op.state)

    def execute(self, v: int, pinned: tuple[int, ...], depth: int) -> None:
        """One execution of op v, with what it reads made present and room made for what it writes."""
        op, sizes = self.problem.ops[v], self.problem.sizes
        again = v < self.now
        reads = self._reads_again(v) if again else op.reads
        self.ensure(reads, (*pinned, *reads), depth)
        writes = op.writes
        if op.state is not None and not again and self.repeatable[v]:
            writes = (*writes, op.state)
        new = [s for s in writes if s not in self.present]
        more = sum(sizes[s] for s in new)
        scratch = op.scratch + (op.repeat_scratch if again else 0)
        reused = () if again else tuple(a for a, _ in op.reuse)
        for a in reused:
            if self.leaves(a, v):
                self.drop(a)
        if self.budget is not None:
            kept = {*pinned, *reads, *writes}.difference(reused)
            self.make_room(self.budget - more - scratch, kept)
        self.left -= op.cost if again else 0
        if self.left < 0 or len(self.schedule) >= LONGEST[0] * len(self.problem.ops) + LONGEST[1]:
            raise GaveUp
        self.schedule.append(v)
        self.used += more
        self.present.update(dict.fromkeys(new))
        if again:
            self.enqueue((*reads, *new))

    def leaves(self, s: int, t: int) -> bool:
        """Storage s, read by the first execution of t, is absent after it."""
        at = bisect_left(self.windows.instants, t)
        dropped = self.windows.instants[at : at + 1] == (t,) and s not in self.windows.kept[at]
        return self.table.need[s] <= t or (dropped and self.problem.sizes[s] > 0)

    def drop(self, s: int) -> None:
        """Make a storage absent, unless it is held."""
        if self.problem.held[s] < self.now:
            del self.present[s]
            self.used -= self.problem.sizes[s]

    def enqueue(self, storages: Iterable[int]) -> None:
        """Queue those that may be dropped, with their h of now; only after a read can it have shrunk."""
        if self.budget is None:
            return
        for s in storages:
            if self.problem.sizes[s] and s in self.present and self.problem.held[s] < self.now:
                heappush(self.queue, (self.score(s), s))

    def make_room(self, room: int, pinned: set[int]) -> None:
        """Drop storages, the least h first, until those present take at most `room` bytes."""
        aside: list[tuple[float, int]] = []
        while self.used > room:
            if not self.queue:
                raise GaveUp
            queued, s = heappop(self.queue)
            if s not in self.present:
                continue
            score = self.score(s)
            if s in pinned or score == float("inf"):
                aside.append((score, s))
            elif score > queued:
                heappush(self.queue, (score, s))
            else:
                self.drop(s)
        for entry in aside:
            heappush(self.queue, entry)

    def score(self, s: int) -> float:
        """The h of a present storage: negative if it may go for nothing, infinite if it must stay."""
        following = self.next_read(s)
        if self.table.need[s] < self.now:
            return -2.0
        serves = [
            self.next_read(x)
            for c in self.table.readers[s]
            if c < self.now and self.repeatable[c]
            for x in self.problem.ops[c].writes
            if x not in self.present and self.table.need[x] >= self.now
        ]
        if following == float("inf") and not serves:
            return -1.0
        price = self.price(s)
        if price == float("inf"):
            return price
        distance = min(following, *serves) if serves else following
        distance = min(distance, float(len(self.problem.ops)))
        unplanned = self.window >= 0 and not self.planned(s)
        value = (price + 1e-3) / (self.problem.sizes[s] * (distance - self.now + 1))
        return value * 1e-9 if unplanned else value

    def planned(self, s: int) -> bool:
        """The plan reads it in this window, or keeps it at the next instant."""
        k = self.window
        instants = self.windows.instants
        end = instants[k + 1] if k + 1 < len(instants) else len(self.problem.ops)
        if self.next_read(s) <= end or (k + 1 < len(instants) and s in self.windows.kept[k + 1]):
            return True
        return any(c in self.windows.repeated[k] for c in self.table.readers[s])

    def next_read(self, s: int) -> float:
        """First op from now on whose first execution reads it; infinite if there is none."""
        readers = self.table.readers[s]
        at = bisect_right(readers, self.now - 1)
        return readers[at] if at < len(readers) else float("inf")

    def price(self, s: int) -> float:
        """Cost to have a storage back once it is dropped; infinite if it could not be."""
        total, seen, stack = 0, set[int](), [s]
        while stack:
            v = self.table.writer[stack.pop()]
            if v in seen:
                continue
            if not self.repeatable[v]:
                return float("inf")
            seen.add(v)
            total += self.problem.ops[v].cost
            if len(seen) < FARTHEST:
                stack += [x for x in self._reads_again(v) if x not in self.present or x == s]
        return total
