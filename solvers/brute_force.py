"""Exact solution by search over all states of memory, for problems of about ten ops: the tests' oracle.

A state is (ops executed so far, storages that can be read, held first instances that a repetition has
replaced); the last two are bit masks. From a state, any storage may be dropped for nothing, the next op
may be executed for the first time, with or without reuse of what it reads, or an earlier candidate again
at its cost, if the bytes while it runs fit the budget. Dijkstra's algorithm finds the cheapest way to the
end; among equals, one with the fewest executions.

It shares nothing with the other solvers but the problem: no order of recomputation, no limit on their
number and no model of windows is assumed.

Not handled: more than `MOST_STORAGES` storages; the number of states is exponential in it.
"""

import heapq
import time
from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

from remat.ir import SolverError

from .evaluate import evaluate
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status

MOST_STORAGES = 24

_State: TypeAlias = tuple[int, int, int]
_Length: TypeAlias = tuple[int, int]
"""Cost of the repetitions, number of executions."""


def solve_brute_force(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> Solution:
    """Cheapest schedule that fits the budget, proven.

    Raises:
        SolverError: the problem has more than `MOST_STORAGES` storages.
    """
    if len(problem.sizes) > MOST_STORAGES:
        raise SolverError(
            f"{len(problem.sizes)} storages; brute force takes at most {MOST_STORAGES}: "
            "use solve_windows"
        )
    deadline = time.monotonic() + limits.time_s
    start: _State = (0, 0, 0)
    best: dict[_State, _Length] = {start: (0, 0)}
    came: dict[_State, tuple[_State, int]] = {}
    queue: list[tuple[_Length, _State]] = [((0, 0), start)]
    while queue:
        length, state = heapq.heappop(queue)
        if length > best[state]:
            continue
        if state[0] == len(problem.ops):
            schedule = _schedule(came, state)
            peak = evaluate(problem, schedule).peak
            cost = length[0]
            return Solution(Status.OPTIMAL, schedule, cost, peak, cost, problem.bound_class)
        if time.monotonic() > deadline:
            return Solution(Status.UNKNOWN, (), 0, 0, float(length[0]), problem.bound_class)
        for (more, executions), v, following in _steps(problem, state):
            reached = (length[0] + more, length[1] + executions)
            if following not in best or reached < best[following]:
                best[following] = reached
                came[following] = (state, v)
                heapq.heappush(queue, (reached, following))
    return Solution(Status.INFEASIBLE, (), 0, 0, float("inf"), problem.bound_class)


def _schedule(came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
    """The executions on the way to a state."""
    executions: list[int] = []
    while state in came:
        state, v = came[state]
        if v >= 0:
            executions.append(v)
    return tuple(reversed(executions))


def _steps(problem: Problem, state: _State) -> Iterator[tuple[_Length, int, _State]]:
    """What can happen next: its length, the op (-1 for a drop), the state after it."""
    done, readable, replaced = state
    for s in _members(readable):
        if problem.held[s] < done or replaced >> s & 1:
            yield (0, 0), -1, (done, readable & ~(1 << s), replaced)
    for v in range(min(done + 1, len(problem.ops))):
        op = problem.ops[v]
        again = v < done
        reads = _mask(op.reads)
        if again and op.state is not None:
            reads |= 1 << op.state
        if reads & ~readable or (again and not op.candidate):
            continue
        held = [s for s in op.writes if again and problem.held[s] >= done]
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
                yield (op.cost, 1), v, (done, now, now_replaced)
            else:
                ended = [s for s in _members(now_replaced) if problem.held[s] <= v]
                yield (0, 1), v, (done + 1, now, now_replaced & ~_mask(tuple(ended)))


def _choices(problem: Problem, state: _State, v: int) -> list[tuple[int, int]]:
    """What the first execution of v may write beyond its writes, and in place of what it writes."""
    op, (_, _, replaced) = problem.ops[v], state
    extra = [0] if op.state is None else [0, 1 << op.state]
    free = [a for a, _ in op.reuse if problem.held[a] <= v or replaced >> a & 1]
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
