"""A lower bound on the cost over every order of first executions, with any recomputation.

The other bounds hold for the order of ops as it is given. Another order may need less recomputation, so how
far an answer is from the best of all programs needs a bound of its own. An *order* here is any in which an op
follows the writers of what it reads and of what is held until it.

Fix one op t. Whatever the order, when t is first executed its ancestors have been, and its descendants have
not. The model looks at that instant alone. Storage s has size m_s and writer w(s).

Variables.
    S[s] = 1 if an instance of s is alive while t executes, and stays for a later read.
    R[v] = 1 if op v, first executed before t, is executed again after it.
    F[i] = 1 if op i, neither ancestor nor descendant of t, is first executed after it.

Objective.
    min Σ cost_v · R[v]

Constraints.
    (1) Σ_s m_s · S[s] + Σ_i m_s · (1 - F[i]) over the s of i held beyond t
            <= budget - resident - scratch(t) - what t touches - what is held                → _memory
        where for a pair (a, b) in reuse(t), b counts m_b · S[a]; S[s] = 0 for s in absent(t)
    (2) S[s] + R[w(s)] + F[w(s)] >= 1  if a descendant of t reads s                          → _reads
    (3) R[v] <= S[s] + R[w(s)]  for s in reads(v);  R[v] <= S[state(v)]                      → _reads
    (4) F[i] <= S[s] + R[w(s)] + F[w(s)]  for s in reads(i)                                  → _reads
    (5) F[i] <= F[j]  if j reads what i writes, or i writes what is held until j             → _sequence
        S[s] <= 1 - F[w(s)];  R[i] <= 1 - F[i], so (3) needs no F: what i reads was written before t too
    No R[v] for an op that is not a candidate, no F for an ancestor, no variable for what t itself writes.

Every schedule of every order maps to a solution that costs no more, so the optimum bounds them all, for any
t; the best of a few is returned. It is never above the single-window bound for the given order at the same t,
and equal to it where every op depends on t or t on it.

Not handled: more than one instant, and therefore budgets near the least peak, where this is weak.
"""

import time
from dataclasses import dataclass, field
from math import inf

from ortools.math_opt.python import mathopt

from .evaluate import evaluate
from .index import Index, index
from .problem import DEFAULT_LIMITS, FORBIDDEN, Limits, Problem
from .window_model import add_at_most, percent, proven_bound, run_highs

INSTANTS = 3
"""Ops that are tried as t, each a hundredth of the program from the others."""
LOOKED_AT = 100
"""Ops whose bytes in any order are counted."""
NODES = 1_000_000
"""Branch-and-bound nodes times ops of one solve, roughly."""


def any_order_bound(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> float:
    """No schedule that fits the budget costs less, in whatever order ops are first executed.

    Args:
        problem: with the budget to enforce; its order of ops does not matter.
        limits: the clock; the gap is that of one solve.

    Returns:
        In the problem's unit of time; infinite if no order fits the budget at all.
    """
    deadline = time.monotonic() + limits.time_s
    table = index(problem)
    before, after = _closures(problem, table)
    best = 0.0
    for t in _instants(problem, table, before, after):
        left = deadline - time.monotonic()
        if left <= 0 or best == inf:
            break
        model = _Model(problem, table, t, before[t], after[t])
        best = max(best, model.bound(left, limits.gap))
    return best


def _closures(problem: Problem, table: Index) -> tuple[list[int], list[int]]:
    """Per op, as bit masks: its ancestors and its descendants."""
    n = len(problem.ops)
    before, after = [0] * n, [0] * n
    direct: list[list[int]] = [[table.writer[s] for s in op.reads] for op in problem.ops]
    for s, until in enumerate(problem.held):
        if 0 <= table.writer[s] < until < n:
            direct[until].append(table.writer[s])
    for v in range(n):
        for u in direct[v]:
            before[v] |= before[u] | 1 << u
    for v in reversed(range(n)):
        for u in direct[v]:
            after[u] |= after[v] | 1 << v
    return before, after


def _instants(problem: Problem, table: Index, before: list[int], after: list[int]) -> list[int]:
    """Ops during which the most bytes are alive in every order, if nothing is executed again; most first."""
    used = evaluate(problem, range(len(problem.ops))).bytes
    likely = sorted(range(len(used)), key=lambda t: (-used[t], t))[:LOOKED_AT]
    total: dict[int, int] = {}
    readers = [sum(1 << v for v in of) for of in table.readers]
    for t in likely:
        op = problem.ops[t]
        touched = {*op.reads, *op.writes}
        earlier, later = before[t], after[t]
        total[t] = op.scratch + sum(
            size
            for s, size in enumerate(problem.sizes)
            if s in touched or (readers[s] & later and earlier >> table.writer[s] & 1)
        )
    apart = len(problem.ops) // 100
    found: list[int] = []
    for t in sorted(total, key=lambda t: (-total[t], t)):
        if all(abs(t - other) > apart for other in found):
            found.append(t)
    return found[:INSTANTS]


@dataclass(slots=True)
class _Model:
    """The model at op t while it is built; see the module's definitions."""

    problem: Problem
    table: Index
    t: int
    before: int
    after: int
    model: mathopt.Model = field(default_factory=mathopt.Model)
    s: dict[int, mathopt.Variable] = field(default_factory=dict)
    r: dict[int, mathopt.Variable] = field(default_factory=dict)
    f: dict[int, mathopt.Variable] = field(default_factory=dict)

    def bound(self, time_s: float, gap: float) -> float:
        """Build it and solve it."""
        ops = self.problem.ops
        there = self.there()
        later = [v for v in range(len(ops)) if self.after >> v & 1]
        free = [
            v
            for v in range(len(ops))
            if v != self.t and not (self.before >> v & 1 or self.after >> v & 1)
        ]
        for i in free:
            self.f[i] = self.model.add_binary_variable()
        self._variables([*later, *free])
        self._memory(there)
        self._reads(later)
        self._sequence()
        return self._solve(time_s, gap)

    def there(self) -> dict[int, None]:
        """Storages certainly alive during t: it touches them, or they are held until or beyond it."""
        op, n = self.problem.ops[self.t], len(self.problem.ops)
        found = dict.fromkeys((*op.reads, *op.writes))
        for s, until in enumerate(self.problem.held):
            written = self._earlier(self.table.writer[s])
            if written and until >= 0 and (until in (self.t, n) or self.after >> until & 1):
                found[s] = None
        return found

    def _variables(self, readers: list[int]) -> None:
        """S and R of what is read after t, and of what it takes to execute that again."""
        ops, table = self.problem.ops, self.table
        waiting = [s for v in readers for s in ops[v].reads]
        for s in waiting:
            w = table.writer[s]
            if s in self.s or not (self._earlier(w) or w in self.f):
                continue
            self.s[s] = self.model.add_binary_variable()
            if ops[w].candidate and w not in self.r and s not in table.states:
                self.r[w] = self.model.add_binary_variable()
                waiting += ops[w].reads
                state = ops[w].state
                if state is not None:
                    waiting.append(state)

    def _memory(self, there: dict[int, None]) -> None:
        """(1) Bytes during t, divided by the room that what is certainly there leaves."""
        problem, sizes = self.problem, self.problem.sizes
        op = problem.ops[self.t]
        moved = {a: b for a, b in op.reuse if not self._beyond(a)}
        certain = [s for s in there if s not in moved.values()]
        room = problem.budget - problem.resident - op.scratch - sum(sizes[s] for s in certain)
        room -= FORBIDDEN if there.keys() & {*op.absent} else 0
        coefficients = [
            (x, sizes[s]) for s, x in self.s.items() if s not in there and not self._tied(s)
        ]
        coefficients += [(self.s[a], sizes[b]) for a, b in moved.items() if a in self.s]
        outputs = [s for i in self.f for s in problem.ops[i].writes if self._tied(s)]
        room -= sum(sizes[s] for s in outputs)
        row = self.model.add_linear_constraint(ub=1.0 if room > 0 else float(room))
        scale = room if room > 0 else 1
        for x, size in coefficients:
            row.set_coefficient(x, size / scale)
        for s in outputs:
            x = self.f[self.table.writer[s]]
            row.set_coefficient(x, row.get_coefficient(x) - sizes[s] / scale)
        for s in op.absent:
            if s in self.s and s not in there:
                self.s[s].upper_bound = 0.0
            if s in outputs:
                self.f[self.table.writer[s]].lower_bound = 1.0

    def _earlier(self, v: int) -> bool:
        """Op v is an ancestor of t; -1 is no op."""
        return v >= 0 and bool(self.before >> v & 1)

    def _beyond(self, s: int) -> bool:
        """It is certainly held beyond t, if it is written before."""
        until = self.problem.held[s]
        return until >= 0 and (until == len(self.problem.ops) or bool(self.after >> until & 1))

    def _tied(self, s: int) -> bool:
        """Its op may run before t or after it, and if before, it is held beyond."""
        return self.table.writer[s] in self.f and self._beyond(s)

    def _at_most(self, x: mathopt.Variable | None, sources: list[mathopt.Variable | None]) -> None:
        """Add x <= Σ sources, where x None means 1, and a source None is absent."""
        add_at_most(self.model, x, [source for source in sources if source is not None])

    def _reads(self, later: list[int]) -> None:
        """(2) to (4) What is read after t stays, is executed again, or is first executed after it."""
        ops, writer = self.problem.ops, self.table.writer
        for s in dict.fromkeys(s for v in later for s in ops[v].reads):
            if s in self.s:
                w = writer[s]
                self._at_most(None, [self.s[s], self.r.get(w), self.f.get(w)])
        for v, x in self.r.items():
            for s in ops[v].reads:
                self._at_most(x, [self.s[s], self.r.get(writer[s])])
            state = ops[v].state
            if state is not None:
                self._at_most(x, [self.s[state]])
        for i, x in self.f.items():
            for s in ops[i].reads:
                w = writer[s]
                self._at_most(x, [self.s[s], self.r.get(w), self.f.get(w)])

    def _sequence(self) -> None:
        """(5) After what is first executed after t come its descendants; none of it is there during t."""
        ops, writer = self.problem.ops, self.table.writer
        for i, x in self.f.items():
            for s in ops[i].reads:
                if writer[s] in self.f:
                    self._at_most(self.f[writer[s]], [x])
            for s in ops[i].writes:
                until = self.problem.held[s]
                if until in self.f and until != i:
                    self._at_most(x, [self.f[until]])
        exclusive = [(y, writer[s]) for s, y in self.s.items()] + [
            (y, v) for v, y in self.r.items()
        ]
        for y, v in exclusive:
            if v in self.f:
                self.model.add_linear_constraint(self.f[v] + y <= 1.0)

    def _solve(self, time_s: float, gap: float) -> float:
        """HiGHS's proven bound."""
        scale = percent(self.problem)
        for v, x in self.r.items():
            self.model.objective.set_linear_coefficient(x, self.problem.ops[v].cost * scale)
        nodes = max(20, NODES // len(self.problem.ops))
        result = run_highs(self.model, gap=gap, nodes=nodes, time_s=time_s)
        return proven_bound(result, scale)
