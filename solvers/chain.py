"""Nested recomputation along a chain of blocks: the specialist for budgets near the least peak.

Training programs are mostly a chain: forward runs blocks F_0 .. F_{L-1}, backward runs B_{L-1} .. B_0, and
little crosses from block to block. The *boundary* of F_k is what later blocks of forward read of it. With
boundaries as checkpoints, a segment of the chain is computed again and again in nested fashion, as in
Griewank and Walther's revolve (TOMS 2000), and optimally so by the dynamic program of Beaumont et al.
("Optimal checkpointing for heterogeneous chains", Inria RR-9302, 2019; also known as rotor). With m bytes
left, the time of the forward ops that F_s .. F_t and their backward need is

    C(s,t,m) = min of
        run F_s, keep all that B_s reads:      f_s + C(s+1, t, m - kept_s)
        run F_s .. F_{i-1}, keep their last
        boundary:       f_s + .. + f_{i-1} + C(i, t, m - boundary_{i-1}) + C(s, i-1, m)

where both need that forward and backward of the block fit into m. Bytes are counted in `SLOTS` steps.

The blocks are found from the problem (`find_chain`), not given: the border is where the most storages wait
for a later reader, and forward is cut where little crosses. The result is a sequence of executions and drops,
run by `decode.Run`, which makes whatever the chain did not foresee (skip connections, say) lazily. So the
schedule is always valid; whether it fits is for the evaluator to say. No bound.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np

from .decode import GaveUp, Run
from .evaluate import evaluate
from .improve import drop_repetitions, prune
from .index import Index
from .problem import Problem

FACTORS = (1.0, 0.95, 0.9, 0.85, 1.05, 1.12, 1.2)
"""Of the budget, for which the dynamic program is asked."""
SLOTS = 480
"""Steps in which the dynamic program counts bytes."""
MOST_BLOCKS = 64
LEAST_BLOCKS = 4
GLOBAL = 4
"""A storage whose readers in forward lie in more than this many blocks is no boundary; it stays."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of forward, and the piece of backward that undoes it. Ops are ranges [start, stop)."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    inner: tuple[int, ...]
    """Storages that its forward writes, and that may be dropped and made again."""
    boundary: frozenset[int]
    """What it and earlier blocks write and later blocks of forward read."""
    kept: frozenset[int]
    """What it writes and backward reads, and the boundary."""
    time: int
    """Of its forward ops that may be repeated, in the problem's unit."""
    kept_bytes: int
    """Of what it writes and keeps."""
    pass_bytes: int
    """While its forward runs and keeps the boundary only; beyond what was there."""
    record_bytes: int
    """While its forward runs and keeps all that backward reads; beyond what was there."""
    backward_bytes: int
    """While its backward runs, if all that it reads was kept; beyond other blocks' storages."""
    waiting_bytes: int
    """Alive when its backward begins, and written by backward, or held."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A training program as a chain of blocks."""

    blocks: tuple[Block, ...]
    constant_bytes: int
    """Resident, and what forward writes that stays anyway."""


def find_chain(problem: Problem, table: Index) -> Chain | None:
    """The chain of a training program; None if there is none worth the name."""
    last = [max(readers, default=-1) for readers in table.readers]
    border = _border(problem, table, last)
    cuts = _cuts(problem, table, last, border)
    if len(cuts) + 1 < LEAST_BLOCKS:
        return None
    starts = [0, *(c + 1 for c in cuts)]
    stops = [*starts[1:], border + 1]
    ends = _backward_ends(problem, last, starts, stops, border)
    begins = [*ends[1:], border + 1]
    inner = [
        _inner(problem, table, border, a, b, starts) for a, b in zip(starts, stops, strict=True)
    ]
    movable = dict.fromkeys(s for storages in inner for s in storages)
    finals = {s: max(table.writer[s], _forward_end(table, s, border)) for s in movable}
    backward = _backward_bytes(problem, table, last, border)
    found = [
        _block(problem, table, last, border, (a, b), (c, d), storages, finals, backward)
        for a, b, c, d, storages in zip(starts, stops, begins, ends, inner, strict=True)
    ]
    constant = problem.resident + sum(
        problem.sizes[s]
        for op in problem.ops[: border + 1]
        for s in op.writes
        if s not in movable and problem.held[s] < 0
    )
    return Chain(tuple(found), constant)


def _border(problem: Problem, table: Index, last: Sequence[int]) -> int:
    """The last op after which the most storages wait for a reader."""
    change = [0] * (len(problem.ops) + 1)
    for s, size in enumerate(problem.sizes):
        if size and last[s] > table.writer[s] >= 0:
            change[table.writer[s]] += 1
            change[last[s]] -= 1
    waiting = list(accumulate(change))
    return max(range(len(problem.ops)), key=lambda t: (waiting[t], t))


def _forward_end(table: Index, s: int, border: int) -> int:
    """Last op of forward that reads a storage, -1 if none does."""
    readers = table.readers[s]
    at = bisect_right(readers, border)
    return readers[at - 1] if at else -1


def _cuts(problem: Problem, table: Index, last: Sequence[int], border: int) -> list[int]:
    """Ops after which forward is cut: again and again the piece that keeps the most, where little crosses."""
    change = [0] * (border + 2)
    kept = [0] * (border + 2)
    for s, size in enumerate(problem.sizes):
        writer, end = table.writer[s], _forward_end(table, s, border)
        # What is read nearly everywhere (a mask, say) crosses everywhere, and says nothing.
        if 0 <= writer < end and end - writer < border // 4:
            change[writer] += size
            change[end] -= size
        if 0 <= writer <= border < last[s] and problem.held[s] < 0:
            kept[writer + 1] += size
    crossing = list(accumulate(change))[:border]
    waiting = list(accumulate(kept))
    pieces = [(-waiting[border + 1], 0, border + 1)]
    cuts: list[int] = []
    while pieces and len(cuts) + 1 < MOST_BLOCKS:
        bytes_, start, stop = heappop(pieces)
        margin = (stop - start) // 10
        inside = range(start + margin, stop - 1 - margin)
        if not inside or -bytes_ * 4 * MOST_BLOCKS < waiting[border + 1]:
            continue
        middle = (start + stop) / 2
        t = min(inside, key=lambda t: (crossing[t], abs(t + 0.5 - middle)))
        cuts.append(t)
        for x, y in ((start, t + 1), (t + 1, stop)):
            heappush(pieces, (waiting[x] - waiting[y], x, y))
    return sorted(cuts)


def _backward_ends(
    problem: Problem, last: Sequence[int], starts: Sequence[int], stops: Sequence[int], border: int
) -> list[int]:
    """Per block, one beyond the op after which nothing reads its storages, or those of later blocks."""
    ends: list[int] = []
    end = border + 1
    for start, stop in zip(reversed(starts), reversed(stops), strict=True):
        writes = (s for op in problem.ops[start:stop] for s in op.writes if problem.held[s] < 0)
        end = max(end, max((last[s] + 1 for s in writes), default=0))
        ends.append(end)
    ends[-1] = len(problem.ops)
    return ends[::-1]


def _inner(
    problem: Problem, table: Index, border: int, start: int, stop: int, starts: Sequence[int]
) -> tuple[int, ...]:
    """What the block may drop and make again: all but what is held, or read in many blocks."""
    found: list[int] = []
    for op in problem.ops[start:stop]:
        for s in op.writes:
            end = _forward_end(table, s, border)
            crossed = bisect_right(starts, end) - bisect_right(starts, stop - 1)
            if op.candidate and problem.held[s] < 0 and crossed <= GLOBAL:
                found.append(s)
    return tuple(found)


def _backward_bytes(problem: Problem, table: Index, last: Sequence[int], border: int) -> list[int]:
    """Bytes at every op of what backward wrote and what is held; 0 in forward."""
    n = len(problem.ops)
    change = [0] * (n + 1)
    for s, size in enumerate(problem.sizes):
        writer = table.writer[s]
        if writer > border or (writer >= 0 and problem.held[s] > border):
            end = min(n - 1, max(writer, last[s], problem.held[s]))
            change[max(writer, border + 1)] += size
            change[end + 1] -= size
    return list(accumulate(change))[:n]


def _block(
    problem: Problem,
    table: Index,
    last: Sequence[int],
    border: int,
    forward: tuple[int, int],
    backward: tuple[int, int],
    inner: tuple[int, ...],
    ends: Mapping[int, int],
    backward_bytes: Sequence[int],
) -> Block:
    boundary = frozenset(s for s in ends if table.writer[s] < forward[1] <= ends[s])
    recorded = {s for s in inner if s in boundary or last[s] > border}
    lives = [(s, table.writer[s], ends[s]) for s in inner]
    final = forward[1] - 1
    scratch = [op.scratch for op in problem.ops]
    passing = [(s, a, final if s in boundary else b) for s, a, b in lives]
    recording = [(s, a, final if s in recorded else b) for s, a, b in lives]
    undoing = [(s, backward[0], last[s]) for s in recorded if last[s] >= backward[0]]
    begin, size = backward[0], problem.sizes
    return Block(
        forward,
        backward,
        inner,
        boundary,
        boundary | recorded,
        time=sum(op.cost for op in problem.ops[forward[0] : forward[1]] if op.candidate),
        kept_bytes=sum(size[s] for s in recorded),
        pass_bytes=_most(problem, passing, forward, scratch),
        record_bytes=_most(problem, recording, forward, scratch),
        backward_bytes=_most(
            problem,
            undoing,
            backward,
            [a + b for a, b in zip(scratch, backward_bytes, strict=True)],
        ),
        waiting_bytes=backward_bytes[begin] if begin < len(problem.ops) else 0,
    )


def _most(
    problem: Problem,
    lives: Sequence[tuple[int, int, int]],
    ops: tuple[int, int],
    beside: Sequence[int],
) -> int:
    """Most bytes during a range of ops, of storages with the op that first has them and the last."""
    start, stop = ops
    change = [0] * (stop - start + 1)
    for s, first, final in lives:
        change[first - start] += problem.sizes[s]
        change[min(final, stop - 1) + 1 - start] -= problem.sizes[s]
    alive = accumulate(change[:-1])
    return max((a + beside[start + i] for i, a in enumerate(alive)), default=0)


class _Table:
    """The dynamic program: for every segment, time and choice by the bytes that are left."""

    def __init__(self, problem: Problem, table: Index, chain: Chain) -> None:
        self.blocks = chain.blocks
        self.constant = chain.constant_bytes
        self.sizes = problem.sizes
        self.writer = table.writer
        most = int(max(FACTORS) * problem.budget) - self.constant
        self.unit = max(1, -(-most // SLOTS))
        self.time: dict[tuple[int, int], Any] = {}
        self.choice: dict[tuple[int, int], Any] = {}
        count = len(self.blocks)
        self.checkpoints = [
            [self.checkpoint(s, i) if i > s else 0 for i in range(count)] for s in range(count)
        ]
        for length in range(count):
            for s in range(count - length):
                self._fill(s, s + length)

    def slots(self, size: int) -> int:
        """Bytes in steps, rounded up."""
        return min(SLOTS + 1, -(-size // self.unit))

    def slots_of(self, budget: float) -> int:
        """Steps that a budget has."""
        return min(SLOTS, int(budget - self.constant) // self.unit)

    def checkpoint(self, s: int, i: int) -> int:
        """Bytes that a checkpoint before block i takes beyond what was there before block s."""
        start, boundary = self.blocks[s].forward[0], self.blocks[i - 1].boundary
        return sum(self.sizes[x] for x in boundary if self.writer[x] >= start)

    def after(self, s: int, t: int, size: int) -> Any:
        """Time of a segment by the bytes left before `size` of them are taken."""
        shifted = np.full(SLOTS + 1, np.inf)
        taken = self.slots(size)
        shifted[taken:] = self.time[s, t][: SLOTS + 1 - taken]
        return shifted

    def _fill(self, s: int, t: int) -> None:
        """C(s,t,m) for all m; the choice is s to keep all of block s, i for a checkpoint before block i."""
        block, waiting = self.blocks[s], self.blocks[t].waiting_bytes
        if t == len(self.blocks) - 1:
            waiting = 0
        time = (
            np.full(SLOTS + 1, float(block.time))
            if s == t
            else self.after(s + 1, t, block.kept_bytes)
        )
        if s < t:
            time = time + block.time
        time[: self.slots(max(block.record_bytes + waiting, block.backward_bytes))] = np.inf
        choice = np.full(SLOTS + 1, s)
        swept, needed, before = 0.0, 0, 0
        for i in range(s + 1, t + 1):
            swept += self.blocks[i - 1].time
            needed = max(needed, self.blocks[i - 1].pass_bytes + before + waiting)
            before = self.checkpoints[s][i]
            other = swept + self.after(i, t, before) + self.time[s, i - 1]
            other[: self.slots(needed)] = np.inf
            better = other < time
            time = np.where(better, other, time)
            choice = np.where(better, i, choice)
        self.time[s, t], self.choice[s, t] = time, choice


def chain_schedules(problem: Problem, table: Index, deadline: float) -> Iterator[tuple[int, ...]]:
    """Schedules of the dynamic program that fit the budget, each cheaper than the one before.

    It is asked for several budgets near the problem's own, because it counts bytes roughly; a schedule that
    does not fit is run once more with eviction.

    Args:
        problem: what to solve.
        table: of the same ops.
        deadline: by `time.monotonic`.
    """
    chain = find_chain(problem, table)
    if chain is None or problem.budget <= chain.constant_bytes:
        return
    dp = _Table(problem, table, chain)
    tried: set[tuple[int, ...]] = set()
    cost = inf
    for factor in FACTORS:
        for cap in (None, problem.budget):
            if time.monotonic() > deadline:
                return
            schedule = prune(problem, _run(problem, table, dp, factor, cap))
            if not schedule or schedule in tried:
                break
            tried.add(schedule)
            if not evaluate(problem, schedule).feasible:
                continue
            schedule = drop_repetitions(problem, schedule)
            found = evaluate(problem, schedule).cost
            if found < cost:
                cost = float(found)
                yield schedule
            break


def _run(
    problem: Problem, table: Index, dp: "_Table", factor: float, cap: int | None
) -> tuple[int, ...]:
    """The dynamic program's schedule for a factor of the budget; `cap` as the budget of `decode`."""
    left = dp.slots_of(factor * problem.budget)
    if left < 0 or not np.isfinite(dp.time[0, len(dp.blocks) - 1][left]):
        return ()
    run = Run(problem, table, None, cap)
    try:
        _process(run, dp, 0, len(dp.blocks) - 1, left)
    except GaveUp:
        return ()
    return tuple(run.schedule)


def _process(run: Run, table: _Table, s: int, t: int, left: int) -> None:
    """Forward and backward of blocks s to t, with the bytes that are left."""
    blocks = table.blocks
    choice = int(table.choice[s, t][left])
    if choice == s:
        _forward(run, blocks[s], blocks[s].kept)
        if s < t:
            _process(run, table, s + 1, t, left - table.slots(blocks[s].kept_bytes))
        for v in range(*blocks[s].backward):
            run.first(v)
        _drop(run, blocks[s : s + 1], frozenset())
        return
    for k in range(s, choice):
        _forward(run, blocks[k], blocks[k].boundary)
        _drop(run, blocks[s:k], blocks[k].boundary)
    _process(run, table, choice, t, left - table.slots(table.checkpoints[s][choice]))
    _drop(run, blocks[s:choice], frozenset())
    _process(run, table, s, choice - 1, left)


def _forward(run: Run, block: Block, keep: frozenset[int]) -> None:
    """Run the forward of a block, for the first time or again, and keep only some of what it writes."""
    if run.now <= block.forward[0]:
        for v in range(*block.forward):
            run.first(v)
    else:
        run.ensure([s for s in block.inner if s in keep], (), 0)
    _drop(run, (block,), keep)


def _drop(run: Run, blocks: Sequence[Block], keep: frozenset[int]) -> None:
    """Drop everything else that these blocks wrote."""
    for block in blocks:
        for s in block.inner:
            if s in run.present and s not in keep and run.problem.sizes[s]:
                run.drop(s)
