"""Tables derived from a problem, which every solver reads: writers, readers, last needs.

Definitions.
    (1) ``writer[s]`` is the one op that writes storage s (its generator state counts as written by its
        op), -1 if none does.
    (2) Storage s is *needed* after op t if keeping or repeating it after t can matter: ``need[s]`` is the
        last op whose first execution reads s, or reads what a chain of candidates computes from s.
    (3) Storage s is *forced* during op t if it is there in every feasible schedule: t reads or writes it,
        its hold lasts beyond t, or nobody may write it again and a later first execution reads it.
"""

from dataclasses import dataclass

from .problem import FORBIDDEN, Problem


@dataclass(frozen=True, slots=True)
class Index:
    """See the module's definitions; all are indexed by storage, but `need_op`."""

    writer: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    """Ops that read it, ascending."""
    need: tuple[int, ...]
    """Last op for whose sake it can be worth having, -1 if none."""
    need_op: tuple[int, ...]
    """Per op: the last op for whose sake it can be worth repeating, -1 if none or not a candidate."""
    forced: tuple[int, ...]
    """Last op at which it is forced without a break since it was written."""
    states: frozenset[int]
    """Storages that are generator states."""


def index(problem: Problem) -> Index:
    """Build the tables in one pass forward and one backward."""
    ops, storages = problem.ops, len(problem.sizes)
    writer = [-1] * storages
    readers: list[list[int]] = [[] for _ in range(storages)]
    for v, op in enumerate(ops):
        for s in op.writes:
            writer[s] = v
        for s in op.reads:
            readers[s].append(v)
        if op.state is not None:
            writer[op.state] = v
    need, need_op = [-1] * storages, [-1] * len(ops)
    for v in reversed(range(len(ops))):
        op = ops[v]
        if op.candidate:
            need_op[v] = max((need[s] for s in op.writes), default=-1)
            if op.state is not None:
                need[op.state] = need_op[v]
        for s in op.reads:
            need[s] = max(need[s], v, need_op[v])
    forced = [-1] * storages
    for v, op in enumerate(ops):
        for s in op.writes:
            last = max(readers[s], default=-1) if not op.candidate else -1
            forced[s] = max(v, problem.held[s], last)
    return Index(
        tuple(writer),
        tuple(tuple(r) for r in readers),
        tuple(need),
        tuple(need_op),
        tuple(forced),
        frozenset(op.state for op in ops if op.state is not None),
    )


def forced_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes during each first execution that no schedule can avoid; their maximum bounds the peak."""
    table = index(problem)
    n = len(problem.ops)
    change = [0] * (n + 1)
    for s, size in enumerate(problem.sizes):
        if table.forced[s] >= 0:
            change[table.writer[s]] += size
            change[min(table.forced[s], n - 1) + 1] -= size
    total: list[int] = []
    running = problem.resident
    for t, op in enumerate(problem.ops):
        running += change[t]
        extra = sum(problem.sizes[s] for s in op.reads if table.forced[s] < t)
        extra -= sum(problem.sizes[b] for a, b in op.reuse if table.forced[a] <= t)
        if any(s in op.reads or table.forced[s] >= t >= table.writer[s] for s in op.absent):
            extra += FORBIDDEN
        total.append(running + extra + op.scratch)
    return tuple(total)
