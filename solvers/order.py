"""Order: which op runs first where the data leaves a choice, so that less is alive at once.

It finds a permutation of the first executions under which, with nothing repeated, the bytes at the peak
and at every lesser summit are as few as it can make them.
    (1) An op runs after the writers of what it reads, after the ops that write what is held until it, and
        after whatever `before` says; nothing passes a barrier.
    (2) The bytes alive at both ends of a window of consecutive ops do not depend on their order inside. So
        each window is arranged for itself: the least peak inside comes first, then the least sum of its
        bytes, then the order as it was. No window's peak grows, so neither does the program's.
    (3) A window is arranged by dynamic programming over the sets of its ops that may have been executed (as
        in Serenity: Ahn et al., MLSys 2020), exact as long as no more than `STATES` sets have one size.
    (4) Windows overlap by half, and are swept until nothing changes. The evaluator has the last word.

Deterministic: work is limited in counts, and ties fall to the order as it was.

Not handled: moves farther than a few windows, one op across a barrier, repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .evaluate import evaluate
from .problem import FORBIDDEN, Problem

WIDTH = 16
"""Ops in a window."""
STATES = 32
"""Sets of executed ops that are kept of each size."""
SWEEPS = 4
"""Times that all windows are arranged, at most."""


@dataclass(slots=True)
class _Program:
    """The program in its present order; the tables are by op or by storage."""

    problem: Problem
    current: list[int]
    """Ops in order of execution."""
    before: list[set[int]]
    """Ops that must run before each op."""
    users: list[list[int]]
    """Ops that need each storage: it is alive until the last of them."""
    touched: list[list[int]]
    """Storages that each op needs or writes."""
    last: list[int]
    """Position of the last user of each storage; past the end if it is held to the end, -1 if none."""
    arranged: dict[str, list[int]]
    """Windows met before, as in repeated layers, and their best order."""


@dataclass(slots=True)
class _Window:
    """Some consecutive ops; sets of them are bit masks. All lists are by op."""

    ops: list[int]
    before: list[int]
    """The others that must run before."""
    grows: list[int]
    """Bytes that appear while it runs."""
    stays: list[int]
    """Bytes of these that are still there when it has run."""
    dies: list[list[tuple[int, int]]]
    """Users in the window, and bytes, of each storage that it may be the last to use."""
    reuses: list[list[tuple[int, int]]]
    """The same for those in whose place it may write."""

    def execute(self, done: int, alive: int, i: int) -> tuple[int, int, int]:
        """Run op i next; returns the ops done then, the bytes while it runs, and those alive after it."""
        done |= 1 << i
        used, alive = alive + self.grows[i], alive + self.stays[i]
        for users, size in self.reuses[i]:
            if done & users == users:
                used -= size
        for users, size in self.dies[i]:
            if done & users == users:
                alive -= size
        return done, used, alive


def order(
    problem: Problem,
    *,
    barriers: Sequence[int] = (),
    before: Sequence[tuple[int, int]] = (),
) -> tuple[int, ...]:
    """Ops in the order in which they should first be executed; never of a greater peak than as they are.

    Args:
        problem: its budget is not looked at.
        barriers: ops that stay where they are, with the same ops before them and after them.
        before: further pairs (a, b) of ops such that a must run before b, as random ops among each other.
    """
    program = _tables(problem, before)
    n = len(problem.ops)
    segments = [(a + 1, b) for a, b in pairwise([-1, *sorted(barriers), n])]
    for _ in range(SWEEPS):
        if not any([_sweep(program, begin, end) for begin, end in segments]):
            break
    found = tuple(program.current)
    as_it_is = evaluate(problem, range(n)).peak
    return (
        found if evaluate(permuted(problem, found), range(n)).peak <= as_it_is else tuple(range(n))
    )


def permuted(problem: Problem, permutation: Sequence[int]) -> Problem:
    """The problem with its ops in another order; storages keep their numbers.

    Args:
        problem: what to reorder.
        permutation: its ops in order of first execution.
    """
    at = {v: position for position, v in enumerate(permutation)}
    return replace(
        problem,
        ops=tuple(problem.ops[v] for v in permutation),
        held=tuple(at.get(h, h) for h in problem.held),
    )


def _tables(problem: Problem, before: Sequence[tuple[int, int]]) -> _Program:
    ops, n = problem.ops, len(problem.ops)
    writer = {s: v for v, op in enumerate(ops) for s in op.writes}
    users: list[list[int]] = [[] for _ in problem.sizes]
    touched = [[*op.reads, *op.writes] for op in ops]
    for v, op in enumerate(ops):
        for s in op.reads:
            users[s].append(v)
    for s, until in enumerate(problem.held):
        if s in writer and writer[s] < until < n and until not in users[s]:
            users[s].append(until)
            touched[until].append(s)
    earlier: list[set[int]] = [set() for _ in ops]
    for s, v in writer.items():
        for user in users[s]:
            earlier[user].add(v)
    for a, b in before:
        earlier[b].add(a)
    last = [
        n if until >= n else max(of, default=-1)
        for of, until in zip(users, problem.held, strict=True)
    ]
    return _Program(problem, list(range(n)), earlier, users, touched, last, {})


def _sweep(program: _Program, begin: int, end: int) -> bool:
    """Arrange all windows between two positions, one after the other; tells whether anything changed."""
    changed = False
    for low in range(begin, end, WIDTH // 2):
        high = min(low + WIDTH, end)
        window = _window(program, low, high)
        lists = (window.before, window.grows, window.stays, window.dies, window.reuses)
        key = repr(lists)
        if key not in program.arranged:
            program.arranged[key] = _arrange(window)
        arranged = program.arranged[key]
        if arranged != list(range(high - low)):
            changed = True
            program.current[low:high] = [window.ops[i] for i in arranged]
            _place(program, low, high)
    return changed


def _place(program: _Program, low: int, high: int) -> None:
    """Find the last users anew of what the ops between two positions touch."""
    at = {v: low + i for i, v in enumerate(program.current[low:high])}
    for v in program.current[low:high]:
        for s in program.touched[v]:
            if low <= program.last[s] < high:
                program.last[s] = max(at[u] for u in program.users[s] if u in at)


def _window(program: _Program, low: int, high: int) -> _Window:
    problem, ops = program.problem, program.current[low:high]
    bit = {v: 1 << i for i, v in enumerate(ops)}
    users: dict[int, int] = {}  # of the storages that die in the window
    for v in ops:
        for s in program.touched[v]:
            if s not in users and low <= program.last[s] < high:
                users[s] = sum(bit.get(u, 0) for u in program.users[s])
    window = _Window(ops, [], [], [], [], [])
    for v in ops:
        op, sizes = problem.ops[v], problem.sizes
        window.before.append(sum(bit.get(u, 0) for u in program.before[v]))
        window.grows.append(op.scratch + sum(sizes[s] for s in op.writes))
        window.stays.append(sum(sizes[s] for s in op.writes if program.last[s] >= low))
        dying = [s for s in program.touched[v] if users.get(s, 0) & bit[v]]
        window.dies.append([(users[s], sizes[s]) for s in dying])
        window.reuses.append([(users[a], sizes[a]) for a, _ in op.reuse if a in users])
    return window


def _arrange(window: _Window) -> list[int]:
    """The window's ops in their best order, as numbers in the window; as they are if nothing is better.

    Bytes count from those alive where the window begins, on which the best order does not depend.
    """
    length = len(window.ops)
    done = alive = 0
    as_it_is: list[int] = []
    for i in range(length):
        done, used, alive = window.execute(done, alive, i)
        as_it_is.append(used)
    peak = max(as_it_is)
    # Per set of ops done: (peak so far, sum of bytes so far, bytes alive, the set before, the op).
    layers: list[dict[int, tuple[int, int, int, int, int]]] = [{0: (-FORBIDDEN, 0, 0, 0, 0)}]
    for _ in range(length):
        reached: dict[int, tuple[int, int, int, int, int]] = {}
        for done, (most, area, alive, _, _) in layers[-1].items():
            for i in range(length):
                if done >> i & 1 or window.before[i] & ~done:
                    continue
                now, used, left = window.execute(done, alive, i)
                if used > peak:
                    continue
                known = reached.get(now)
                entry = (max(most, used), area + used, left, done, i)
                if known is None or entry[:2] < known[:2]:
                    reached[now] = entry
        if len(reached) > STATES:
            reached = dict(sorted(reached.items(), key=lambda x: (x[1][:2], x[0]))[:STATES])
        layers.append(reached)
    full = (1 << length) - 1
    if full not in layers[-1] or layers[-1][full][:2] >= (peak, sum(as_it_is)):
        return list(range(length))
    arranged: list[int] = []
    for layer in reversed(layers[1:]):
        _, _, _, full, i = layer[full]
        arranged.append(i)
    return arranged[::-1]
