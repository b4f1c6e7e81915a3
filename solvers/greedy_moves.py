"""The moves of the greedy solver (`greedy.py`) and what each costs and frees.

A move evicts a storage around one execution, the *worst* one: it is dropped after its last read before and
its op executed again just before its next read. What that op reads and is dead by then is either kept alive
until then, or executed again too, whichever is cheaper at a given price per byte.

A move may evict more: once something is kept or executed again for the first storage, others that are
computed from the same cost only their own op (the outputs of a chain of concatenations share their pieces;
those of a cast and an activation share the product before them). They are taken along, cheapest first, while
that lowers the price of the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from .index import Index
from .problem import FORBIDDEN, Problem
from .timeline import Execution, Timeline

DEAREST = 1e30
"""A price at which nothing is kept that can be executed again."""
FARTHEST = 64
"""Ops executed again for one eviction, and readers of one storage that are looked at."""


@dataclass(frozen=True, slots=True)
class Step:
    """Ops to execute again."""

    ops: tuple[int, ...]
    """Ascending."""
    before: Execution
    merged: tuple[Execution, ...]
    """Later repetitions that this makes superfluous."""


@dataclass(frozen=True, slots=True)
class Move:
    """One eviction, of one storage or several."""

    price: float
    """Cost over gain."""
    cost: float
    """Of the ops executed again."""
    storage: int
    steps: tuple[Step, ...]
    """In the order of their positions."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Where a storage is not needed."""

    storage: int
    after: int
    """Position of its last read before the worst execution."""
    before: Execution
    """Its next read."""


@dataclass(slots=True)
class Plan:
    """What it takes to execute an op again before a position."""

    ops: list[int] = field(default_factory=list)
    merged: list[Execution] = field(default_factory=list)
    cost: int = 0
    longer: float = 0.0
    """Weighted bytes of what merging keeps."""
    kept: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Storages to keep: position at which they would end, weighted bytes until they are read."""


@dataclass(slots=True)
class Moves:
    """Prices the evictions around one execution."""

    problem: Problem
    table: Index
    timeline: Timeline
    weights: list[float]
    """Sum of the weights of all positions before one; they add up to 1."""
    worst: Execution
    excess: int
    """Bytes above the budget there."""
    price: float
    """Paid so far, per weighted byte."""

    def apply(self, move: Move) -> None:
        """Edit the timeline."""
        line = self.timeline
        for step in move.steps:
            for execution in step.merged:
                del self.weights[execution.at]
                line.remove(execution)
            at = step.before.at
            line.insert(list(step.ops), at)
            self.weights[at:at] = [self.weights[at]] * len(step.ops)
        self.excess = line.bytes_at(self.worst) - self.problem.budget
        self.price = max(self.price, move.price)

    def move(self, s: int) -> Move | None:
        """The best way to evict a storage; None if there is none."""
        gap = self.gap(s)
        if gap is None:
            return None
        v = self.table.writer[s]
        for price in dict.fromkeys((self.price, 8 * self.price, 64 * self.price, DEAREST)):
            plan = self.plan(v, gap.before.at, price)
            move = self.grown(gap, plan)
            if move is not None:
                return move
        return None

    def gap(self, s: int) -> Gap | None:
        """The gap between two reads in which the worst execution lies; None if s must be there."""
        at = self.worst.at
        instance = self.timeline.latest(s, at)
        v = self.table.writer[s]
        if instance is None or instance.last.at <= at or s in self.table.states:
            return None
        if not self.problem.ops[v].candidate or not self.problem.sizes[s]:
            return None
        after = instance.writer.at
        if instance.until is not None:
            after = max(after, instance.until.at)
        before: Execution | None = None
        for reader in instance.readers:
            if reader.at <= at:
                after = max(after, reader.at)
            elif before is None or reader.at < before.at:
                before = reader
        if after >= at or before is None or s in self.problem.ops[self.worst.op].writes:
            return None
        return Gap(s, after, before)

    def grown(self, gap: Gap, plan: Plan) -> Move | None:
        """The plan for one storage, and others taken along while that lowers the price."""
        sizes = self.problem.sizes
        cost, gain, relief = float(plan.cost), self.freed(gap), self.size(gap.storage)
        gain -= plan.longer + sum(kept for _, kept in plan.kept.values())
        relief -= sum(sizes[s] for s, (end, _) in plan.kept.items() if end < self.worst.at)
        best, spent = self.priced(cost, gain, relief), cost
        taken, count = [gap], 1
        for price, more, other in sorted(
            self.siblings(gap, plan), key=lambda x: (x[0], x[2].storage)
        ):
            if price >= best:
                break
            cost, gain, relief = (
                cost + price * more,
                gain + more,
                relief + self.size(other.storage),
            )
            taken.append(other)
            now = self.priced(cost, gain, relief)
            if now < best:
                best, count, spent = now, len(taken), cost
        if best == inf:
            return None
        return Move(best, spent, gap.storage, self.steps(taken[:count], plan))

    def priced(self, cost: float, gain: float, relief: float) -> float:
        """Cost per weighted byte, of which only what exceeds the budget counts; infinite if it frees none."""
        if gain <= 0 or relief <= 0:
            return inf
        return cost / (gain * min(1.0, self.excess / relief))

    def size(self, s: int) -> int:
        """What the worst execution takes less if a storage is absent."""
        strict = self.worst.first and s in self.problem.ops[self.worst.op].absent
        return self.problem.sizes[s] + (FORBIDDEN if strict else 0)

    def freed(self, gap: Gap) -> float:
        """Weighted bytes over a gap."""
        return self.size(gap.storage) * (self.weights[gap.before.at] - self.weights[gap.after + 1])

    def kept(self, s: int, end: int, position: int) -> float:
        """Weighted bytes if a storage is kept between two positions; infinite if it must be absent there."""
        banned = self.timeline.banned.get(s)
        if banned is not None and end < banned.at < position:
            return inf
        return self.problem.sizes[s] * (self.weights[position] - self.weights[end + 1])

    def siblings(self, gap: Gap, plan: Plan) -> Iterator[tuple[float, float, Gap]]:
        """Storages whose op needs nothing further: (price, weighted bytes, gap)."""
        ops = self.problem.ops
        v = self.table.writer[gap.storage]
        shared = {*plan.kept, *(s for u in plan.ops if u != v for s in ops[u].writes)}
        seen = {v}
        for x in sorted(shared):
            for c in self.table.readers[x][:FARTHEST]:
                if c in seen or not ops[c].candidate:
                    continue
                seen.add(c)
                for other in (self.gap(s) for s in ops[c].writes):
                    if other is None or not self.readable(c, other.before.at, shared):
                        continue
                    more = self.freed(other)
                    if more > 0:
                        yield ops[c].cost / more, more, other
                        break

    def readable(self, v: int, position: int, shared: set[int]) -> bool:
        """What a repetition of op v reads is there, or among the shared."""
        for s in self.timeline.reads_again(v):
            instance = self.timeline.latest(s, position)
            if s not in shared and (instance is None or instance.last.at < position):
                return False
        return True

    def steps(self, taken: list[Gap], plan: Plan) -> tuple[Step, ...]:
        """What all share is executed before the first of them."""
        v = self.table.writer[taken[0].storage]
        shared = [u for u in plan.ops if u != v]
        steps: list[Step] = []
        for gap in sorted(taken, key=lambda gap: (gap.before.at, gap.storage)):
            ops = sorted({self.table.writer[gap.storage], *(() if steps else shared)})
            steps.append(Step(tuple(ops), gap.before, () if steps else tuple(plan.merged)))
        return tuple(steps)

    def plan(self, v: int, position: int, price: float) -> Plan:
        """The cheapest way to execute op v before a position, if keeping a weighted byte costs `price`."""
        writer, ops = self.table.writer, self.problem.ops
        absent = self.absent(v, position, price)
        value: dict[int, float] = {}
        for u in sorted(absent):
            value[u] = self.least(u, position, price) + sum(
                min(self.paid(kept, price), value.get(writer[s], inf)) for s, _, kept in absent[u]
            )
        plan = Plan([v])
        for u in plan.ops:
            later, kept = self.later(u, position)
            if later is not None and self.paid(kept, price) <= ops[u].cost:
                plan.merged.append(later)
                plan.longer += kept
            else:
                plan.cost += ops[u].cost
            for s, end, kept in absent[u]:
                if value.get(writer[s], inf) >= self.paid(kept, price):
                    plan.kept[s] = end, kept
                elif writer[s] not in plan.ops:
                    plan.ops.append(writer[s])
        return plan

    def absent(
        self, v: int, position: int, price: float
    ) -> dict[int, list[tuple[int, int, float]]]:
        """Op v and the ops that it may be worth to execute again for it, nearest first.

        Returns:
            Per op: what it reads that is dead by then, as (storage, where it ends, weighted bytes if kept).
        """
        table, ops = self.table, self.problem.ops
        found: dict[int, list[tuple[int, int, float]]] = {v: []}
        waiting = [v]
        for u in waiting:
            for s in self.timeline.reads_again(u):
                instance = self.timeline.latest(s, position)
                end = self.timeline.first[u].at if instance is None else instance.last.at
                if end >= position:
                    continue
                kept = self.kept(s, end, position)
                found[u].append((s, end, kept))
                w = table.writer[s]
                if w in found or s in table.states or not ops[w].candidate:
                    continue
                if (
                    self.paid(kept, price) > self.least(w, position, price)
                    and len(found) < FARTHEST
                ):
                    found[w] = []
                    waiting.append(w)
        return found

    def least(self, v: int, position: int, price: float) -> float:
        """Cost of one more execution, or of merging it with a later one."""
        later, kept = self.later(v, position)
        cost = self.problem.ops[v].cost
        return cost if later is None else min(cost, self.paid(kept, price))

    def paid(self, kept: float, price: float) -> float:
        """The price of keeping weighted bytes; what must be absent is not kept for nothing either."""
        return inf if kept == inf else kept * price

    def later(self, v: int, position: int) -> tuple[Execution | None, float]:
        """The next repetition, and the weighted bytes if what it writes is there from the position on."""
        for later in self.timeline.again[v]:
            if later.at >= position:
                writes = self.problem.ops[v].writes
                return later, sum(self.kept(s, position - 1, later.at) for s in writes)
        return None, 0.0
