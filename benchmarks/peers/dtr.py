"""Dynamic tensor rematerialization: online greedy eviction.

The program runs op by op, as an interpreter would run it. When an allocation does not fit, the storage with
the least h is evicted until it does; an op that reads an evicted storage first runs again what wrote it.

    h(s) = (cost of s + cost of its evicted neighbourhood) / (size of s · staleness of s)

The neighbourhood is every evicted storage that would have to be computed again to have s back, or that needs
s to be computed again; staleness is the time since s was last read or written. What the program itself will
not read any more is evicted at once, and may come back for the sake of others.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, with h_DTR over storages. Simulated, as the
paper's own evaluation does. Online means that it looks at nothing ahead of the op that runs.
"""

from collections.abc import Iterator

from benchmarks.step import Step, free
from remat.solvers import Problem, evaluate

BUDGETS = 20
"""Budgets that are tried, between the resident bytes and the program's own peak."""


def dtr_greedy(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One simulated run at each budget; runs that exhaust the memory are left out."""
    problem = free(step.problem)
    peak = evaluate(problem, step.program).peak
    for i in range(BUDGETS - 1, 0, -1):
        budget = problem.resident + (peak - problem.resident) * i // BUDGETS
        found = _Run(problem, budget).run()
        if found:
            yield f"DTR {i / BUDGETS:.2f}", found


class _OutOfMemory(Exception):
    """Everything left is in use, or the run makes no progress."""


class _Run:
    """The interpreter and its memory."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.used = problem.resident
        self.clock = 0
        self.writer = {s: v for v in range(len(problem.ops)) for s in self._writes(v)}
        self.readers: list[list[int]] = [[] for _ in problem.sizes]
        for v, op in enumerate(problem.ops):
            for s in op.reads:
                self.readers[s].append(v)
        self.left = [len(readers) for readers in self.readers]
        """First executions that are still to read a storage: the program's references."""
        self.present: dict[int, int] = {}
        """Storage to the time of its last access."""
        self.pinned: dict[int, int] = {}
        self.executed = [False] * len(problem.ops)
        self.trace: list[int] = []

    def _writes(self, v: int) -> tuple[int, ...]:
        op = self.problem.ops[v]
        return op.writes if op.state is None else (*op.writes, op.state)

    def run(self) -> tuple[int, ...]:
        """The executions; empty if memory is exhausted."""
        try:
            for v, op in enumerate(self.problem.ops):
                self.execute(v)
                for s in op.reads:
                    self.left[s] -= 1
                for s in (*op.reads, *op.writes):
                    if self.left[s] == 0 and self.evictable(s):
                        self.evict(s)
        except (_OutOfMemory, RecursionError):
            return ()
        return tuple(self.trace)

    def execute(self, v: int) -> None:
        """Run an op; what it reads is made present first, and stays while it runs, like what it writes."""
        op, again = self.problem.ops[v], self.executed[v]
        reads = (*op.reads, op.state) if again and op.state is not None else op.reads
        for s in reads:
            self.pinned[s] = self.pinned.get(s, 0) + 1
        for s in reads:
            if s not in self.present:
                self.execute(self.writer[s])
        if len(self.trace) > 6 * len(self.problem.ops):
            raise _OutOfMemory
        writes = op.writes if again else self._writes(v)
        new = [s for s in writes if s not in self.present]
        scratch = op.scratch + (op.repeat_scratch if again else 0)
        for s in writes:  # evicting one that is there gains nothing: it is written again
            self.pinned[s] = self.pinned.get(s, 0) + 1
        self.make_room(sum(self.problem.sizes[s] for s in new) + scratch)
        self.trace.append(v)
        self.executed[v] = True
        self.clock += op.cost
        for s in new:
            self.used += self.problem.sizes[s]
        for s in (*reads, *new):
            self.present[s] = self.clock
        for s in (*reads, *writes):
            self.pinned[s] -= 1

    def evictable(self, s: int) -> bool:
        """It is not in use, and no longer held by the caller."""
        held = self.problem.held[s]
        released = held < 0 or (held < len(self.problem.ops) and self.executed[held])
        is_state = s == self.problem.ops[self.writer[s]].state
        return s in self.present and not self.pinned.get(s) and released and not is_state

    def evict(self, s: int) -> None:
        """Free a storage."""
        del self.present[s]
        self.used -= self.problem.sizes[s]

    def make_room(self, needed: int) -> None:
        """Evict by h until `needed` bytes fit."""
        if self.used + needed <= self.budget:
            return
        scores = {
            s: self.score(s) for s in self.present if self.problem.sizes[s] and self.evictable(s)
        }
        while self.used + needed > self.budget:
            if not scores:
                raise _OutOfMemory
            s = min(scores, key=lambda x: (scores[x], x))
            del scores[s]
            self.evict(s)

    def score(self, s: int) -> float:
        """The heuristic h."""
        v = self.writer[s]
        ops = {v, *self._reach(s, forward=False), *self._reach(s, forward=True)}
        cost = sum(self.problem.ops[x].cost for x in ops)
        staleness = self.clock - self.present[s] + 1
        return cost / (self.problem.sizes[s] * staleness)

    def _reach(self, s: int, *, forward: bool) -> list[int]:
        """Ops that wrote the evicted storages connected to s, upwards or downwards."""
        seen: dict[int, None] = {}
        stack = [s]
        while stack:
            x = stack.pop()
            near = (
                [
                    y
                    for v in self.readers[x]
                    if self.executed[v]
                    for y in self.problem.ops[v].writes
                ]
                if forward
                else list(self.problem.ops[self.writer[x]].reads)
            )
            for y in near:
                v = self.writer[y]
                if y not in self.present and v not in seen:
                    seen[v] = None
                    stack.append(y)
        return list(seen)
