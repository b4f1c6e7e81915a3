"""Improve a schedule between two instants, the rest of it kept as it is.

Between the first executions of ops a and b, a feasible schedule starts from the storages alive after a's
and must leave behind those alive after b's. That is a rematerialization problem of its own, and a small
one: only ops that lead from the former to what is read in between matter. It is solved like the whole
(`windows.py`): the window model with few instants, decoded, evaluated as a part of the whole schedule,
and instants and stage rows added where it exceeds the budget. Large neighbourhood search (Shaw, CP 1998)
whose neighbourhoods are spans of the program.

A result is kept only if the evaluator finds the whole schedule feasible and cheaper.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .decode import decode_span
from .evaluate import evaluate, excesses, instances
from .improve import prune
from .index import Index
from .problem import Problem
from .stage_rows import Rows, add_stage_rows
from .window_model import Span, build_model, solve_model

ROUNDS = 6
"""Times that instants are added."""
NEW_INSTANTS = 3
NEW_ROWS = 6
MOST_OPS = 400
"""Ops that may be repeated in a span: the nearest to what is read there."""
WORK = 200_000
"""Branch-and-bound nodes times variables of one solve, roughly."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A schedule, cut at the first executions of two ops."""

    left: int
    """Position of the first one."""
    right: int
    """Position of the second one."""
    cost: int
    """Time of the repetitions between them, in the problem's unit."""
    span: Span


def improve_span(
    problem: Problem,
    table: Index,
    schedule: tuple[int, ...],
    a: int,
    b: int,
    deadline: float,
) -> tuple[int, ...]:
    """A cheaper feasible schedule that differs only between the first executions of a and b; or empty.

    Args:
        problem: what to solve.
        table: of the same ops.
        schedule: feasible.
        a: op, see above.
        b: op, see above.
        deadline: by `time.monotonic`.
    """
    cut = _cut(problem, table, schedule, a, b)
    if not cut.cost:
        return ()
    instants = [a, b]
    rows: Rows = ()
    known = evaluate(problem, schedule).cost
    for _ in range(ROUNDS):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return ()
        build = build_model(problem, table, instants, cut.span)
        add_stage_rows(build, rows)
        nodes = max(5, WORK // (len(instants) * (len(cut.span.ops) + 1)))
        answer = solve_model(build, gap=1e-5, nodes=nodes, time_s=seconds, loose=0.01)
        if answer.windows is None or answer.bound >= cut.cost:
            return ()
        plain: tuple[int, ...] = ()
        for budget in (None, problem.budget):
            inner = decode_span(
                problem, table, answer.windows, budget, sorted(cut.span.start), cut.cost
            )
            if not inner:
                continue
            whole = (*schedule[: cut.left + 1], *inner, *schedule[cut.right + 1 :])
            whole = prune(problem, whole)
            plain = plain or whole
            found = evaluate(problem, whole)
            if found.feasible and found.cost < known:
                return whole
        new, more = _violated(problem, plain, instants, rows) if plain else ([], ())
        if not new and not more:
            return ()
        instants = sorted({*instants, *new})
        rows = (*rows, *more)
    return ()


def _cut(problem: Problem, table: Index, schedule: tuple[int, ...], a: int, b: int) -> _Cut:
    """What is alive after a's and after b's first execution, and what may be repeated between them."""
    left, right = schedule.index(a), schedule.index(b)
    start: list[int] = []
    end: list[int] = []
    for x in instances(problem, schedule):
        if x.birth <= left < x.death:
            start.append(x.storage)
        if x.birth <= right < x.death:
            end.append(x.storage)
    inner = schedule[left + 1 : right]
    again = [
        v for v, seen in zip(inner, accumulate(inner, max, initial=a), strict=False) if v <= seen
    ]
    ops = _nearest(problem, table, again, (a, b), end)
    cost = sum(problem.ops[v].cost for v in again)
    return _Cut(left, right, cost, Span(frozenset(start), frozenset(end), ops))


def _nearest(
    problem: Problem,
    table: Index,
    again: Sequence[int],
    between: tuple[int, int],
    end: Sequence[int],
) -> tuple[int, ...]:
    """Ops that lead to what is read in the span: all that are repeated now, and the nearest others."""
    found = dict.fromkeys(again)
    read = [
        s for v in (*range(between[0] + 1, between[1] + 1), *found) for s in problem.ops[v].reads
    ]
    queue = list(dict.fromkeys((*read, *end)))
    seen = set(queue)
    for s in queue:
        v = table.writer[s]
        if v < 0 or len(found) > MOST_OPS or not problem.ops[v].candidate:
            continue
        found[v] = None
        queue += [x for x in problem.ops[v].reads if x not in seen]
        seen.update(problem.ops[v].reads)
    return tuple(sorted(found))


def _violated(
    problem: Problem, schedule: tuple[int, ...], instants: Sequence[int], rows: Rows
) -> tuple[list[int], Rows]:
    """Where the schedule exceeds the budget worst within the span: instants and stage rows."""
    new: list[int] = []
    more: list[tuple[int, int]] = []
    first, last = instants[0], instants[-1]
    for _, t, v in excesses(problem, schedule):
        if not first < t <= last:
            continue
        if v < t and (t, v) not in rows:
            more.append((t, v))
        near = (t - 1, t) if v < t else (t,)
        new += [x for x in near if first < x < last and x not in (*instants, *new)]
        if len(new) >= NEW_INSTANTS or len(more) >= NEW_ROWS:
            break
    return new, tuple(more)
