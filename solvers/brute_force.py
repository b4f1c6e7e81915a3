"""Exact solution by search over all states of memory, for problems of about ten ops: the tests' oracle.

A state is (ops executed so far, storages that can be read, held first instances that a repetition has
replaced), as bit masks, and, if stages count, the last op repeated since the last first execution. From a
state, any storage may be dropped for nothing, the next op may be executed for the first time, with or without
reuse of what it reads, or an earlier candidate again at its cost, if the bytes while it runs fit the budget.
Dijkstra's algorithm finds the cheapest way to the end; among equals, one with the fewest executions. In any
order, the next op is any op after the writers of what it reads and of what is held until it.

It shares nothing with the other solvers but the problem: no order of recomputation, no limit on their
number and no model of windows is assumed.

Not handled: more than `MOST_STORAGES` storages; the number of states is exponential in it.
"""

import heapq
import time
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import TypeAlias

from remat.ir import SolverError

from .evaluate import evaluate
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status

MOST_STORAGES = 24

_State: TypeAlias = tuple[int, int, int, int]
_Length: TypeAlias = tuple[int, int]
"""Cost of the repetitions, number of executions."""


def solve_brute_force(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> Solution:
    """Cheapest schedule that fits the budget, proven.

    Raises:
        SolverError: the problem has more than `MOST_STORAGES` storages.
    """
    _check_size(problem)
    cost, executions = _search(problem, limits, any_order=False)
    known = problem.bound_class
    if executions is None:
        status = Status.INFEASIBLE if cost == inf else Status.UNKNOWN
        return Solution(status, (), 0, 0, cost, known)
    peak = evaluate(problem, executions).peak
    return Solution(Status.OPTIMAL, executions, int(cost), peak, cost, known)


def any_order_optimum(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> float:
    """Least cost over every order of first executions; infinite if the budget fits none.

    Raises:
        SolverError: the problem has more than `MOST_STORAGES` storages, or the time was too short.
    """
    _check_size(problem)
    cost, executions = _search(problem, limits, any_order=True)
    if executions is None and cost < inf:
        raise SolverError("brute force ran out of time")
    return cost


def staged_optimum(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> float:
    """Least cost if, between two first executions, ops are repeated in program order, each at most once.

    Raises:
        SolverError: as `any_order_optimum`.
    """
    _check_size(problem)
    cost, executions = _search(problem, limits, any_order=False, staged=True)
    if executions is None and cost < inf:
        raise SolverError("brute force ran out of time")
    return cost


def _check_size(problem: Problem) -> None:
    if len(problem.sizes) > MOST_STORAGES:
        raise SolverError(
            f"{len(problem.sizes)} storages; brute force takes at most {MOST_STORAGES}: "
            "use solve_windows"
        )


def _search(
    problem: Problem, limits: Limits, *, any_order: bool, staged: bool = False
) -> tuple[float, tuple[int, ...] | None]:
    """The least cost and how; None with a cost of infinity if there is no way, or with a bound if late."""
    deadline = time.monotonic() + limits.time_s
    before = _before(problem, any_order=any_order)
    everything = (1 << len(problem.ops)) - 1
    start: _State = (0, 0, 0, -1)
    best: dict[_State, _Length] = {start: (0, 0)}
    came: dict[_State, tuple[_State, int]] = {}
    queue: list[tuple[_Length, _State]] = [((0, 0), start)]
    while queue:
        length, state = heapq.heappop(queue)
        if length > best[state]:
            continue
        if state[0] == everything:
            return float(length[0]), _schedule(came, state)
        if time.monotonic() > deadline:
            return float(length[0]), None
        for (more, executions), v, following in _steps(problem, before, state, staged):
            reached = (length[0] + more, length[1] + executions)
            if following not in best or reached < best[following]:
                best[following] = reached
                came[following] = (state, v)
                heapq.heappush(queue, (reached, following))
    return inf, None


def _before(problem: Problem, *, any_order: bool) -> list[int]:
    """Per op: those that must have been executed before its first execution."""
    n = len(problem.ops)
    if not any_order:
        return [(1 << v) - 1 for v in range(n)]
    before = [0] * n
    for v, op in enumerate(problem.ops):
        for s in op.writes:
            until = problem.held[s]
            readers = [u for u in range(n) if s in problem.ops[u].reads]
            for u in [*readers, *([until] if v < until < n else [])]:
                before[u] |= 1 << v
    return before


def _schedule(came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
    """The executions on the way to a state."""
    executions: list[int] = []
    while state in came:
        state, v = came[state]
        if v >= 0:
            executions.append(v)
    return tuple(reversed(executions))


def _steps(
    problem: Problem, before: list[int], state: _State, staged: bool
) -> Iterator[tuple[_Length, int, _State]]:
    """What can happen next: its length, the op (-1 for a drop), the state after it."""
    done, readable, replaced, last = state
    for s in _members(readable):
        if not _held(problem, done, s) or replaced >> s & 1:
            yield (0, 0), -1, (done, readable & ~(1 << s), replaced, last)
    for v, op in enumerate(problem.ops):
        again = bool(done >> v & 1)
        if before[v] & ~done or (again and not (op.candidate and v > last)):
            continue
        reads = _mask(op.reads)
        if again and op.state is not None:
            reads |= 1 << op.state
        if reads & ~readable:
            continue
        held = [s for s in op.writes if again and _held(problem, done, s)]
        now_replaced = replaced | _mask(tuple(held))
        for extra, reused in [(0, 0)] if again else _choices(problem, state, v):
            now = (readable & ~reused) | _mask(op.writes) | extra
            scratch = op.scratch + (op.repeat_scratch if again else 0)
            used = problem.resident + scratch
            used += sum(problem.sizes[s] for s in _members(now))
            used += sum(problem.sizes[s] for s in _members(now_replaced))
            absent = 0 if again else _mask(op.absent)
            if used > problem.budget or absent & (now | now_replaced):
                continue
            if again:
                yield (op.cost, 1), v, (done, now, now_replaced, v if staged else -1)
            else:
                then = done | 1 << v
                ended = [s for s in _members(now_replaced) if not _held(problem, then, s)]
                yield (0, 1), v, (then, now, now_replaced & ~_mask(tuple(ended)), -1)


def _held(problem: Problem, done: int, s: int) -> bool:
    """The first instance of a storage must still be there once these ops are executed."""
    until = problem.held[s]
    return until >= 0 and not done >> until & 1


def _choices(problem: Problem, state: _State, v: int) -> list[tuple[int, int]]:
    """What the first execution of v may write beyond its writes, and in place of what it writes."""
    op, (done, _, replaced, _) = problem.ops[v], state
    then = done | 1 << v
    extra = [0] if op.state is None else [0, 1 << op.state]
    free = [a for a, _ in op.reuse if not _held(problem, then, a) or replaced >> a & 1]
    reused = map(sum, product(*((0, 1 << a) for a in free)))
    return list(product(extra, reused))


def _mask(storages: tuple[int, ...]) -> int:
    """The set of storages as bits."""
    return sum(1 << s for s in storages)


def _members(mask: int) -> Iterator[int]:
    """Storages of a mask, ascending."""
    s = 0
    while mask:
        if mask & 1:
            yield s
        mask >>= 1
        s += 1
