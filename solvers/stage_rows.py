"""Memory while ops are repeated, as further rows of the window model: for schedules, not for bounds.

Where t - 1 and t are both instants (or t is the last op), window k holds one first execution, that of t, and
the repetitions before it: a *stage*. If these run in program order, each at most once, then what is alive
while j is repeated in the stage can be written down (Checkmate's rule, Jain et al., MLSys 2020):

    L[s] >= present(s) + needed(s) + R[j,k] - 2
    Σ_s m_s · L[s] <= budget - resident - scratch(j) - repeat_scratch(j) - Σ of what j reads and writes

    present(s) = S[s,k], or R[w(s),k] if w(s) < j
    needed(s)  = 1 if t reads s, S[s,k+1], or R[c,k] for a reader c > j; each gives one row

Schedules that repeat an op twice in a stage, or in another order, break these rows, so a model that has
any proves nothing about them.
"""

from collections.abc import Iterable
from typing import TypeAlias

from ortools.math_opt.python import mathopt

from .window_model import Build

Rows: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs (t, j): op j repeated before the first execution of op t."""


def add_stage_rows(build: Build, rows: Iterable[tuple[int, int]]) -> None:
    """Add the rows of each (t, j): op j repeated before the first execution of op t."""
    for t, j in rows:
        if t - 1 not in build.instants:
            continue
        k = build.instants.index(t - 1)
        if j in build.r[k] and (t == len(build.problem.ops) - 1 or t in build.instants):
            _add(build, k, t, j)


def _add(build: Build, k: int, t: int, j: int) -> None:
    problem, model = build.problem, build.model
    op, again = problem.ops[j], build.r[k][j]
    touched = {*op.reads, *op.writes} | ({op.state} if op.state is not None else set[int]())
    room = problem.budget - problem.resident - op.scratch - op.repeat_scratch
    room -= sum(problem.sizes[s] for s in touched)
    if room < 0:
        again.upper_bound = 0.0
        return
    row = model.add_linear_constraint(ub=1.0 if room else 0.0)
    for s in build.s[k]:
        if s in touched or not problem.sizes[s]:
            continue
        alive = model.add_variable(lb=0.0, ub=1.0)
        row.set_coefficient(alive, problem.sizes[s] / (room or 1))
        for present in _present(build, s, k, j):
            for needed in _needed(build, s, k, t, j):
                fixed = 2 - sum(x is None for x in (present, needed))
                limit = model.add_linear_constraint(lb=float(-fixed))
                limit.set_coefficient(alive, 1.0)
                for x in (present, needed):
                    if x is not None:
                        limit.set_coefficient(x, -1.0)
                limit.set_coefficient(again, -1.0)


def _present(build: Build, s: int, k: int, j: int) -> list[mathopt.Variable | None]:
    """What puts s in memory before j is repeated; None where it is there anyway."""
    kept = build.s[k][s]
    again = build.r[k].get(build.table.writer[s])
    early = again is not None and build.table.writer[s] < j and s not in build.states
    return [kept, again] if early and kept is not None else [kept]


def _needed(build: Build, s: int, k: int, t: int, j: int) -> list[mathopt.Variable | None]:
    """What keeps s in memory after j is repeated; None if something does so anyway."""
    following = build.s[k + 1] if k + 1 < len(build.s) else {}
    if (
        s in build.problem.ops[t].reads
        or build.table.forced[s] >= t
        or (s in following and following[s] is None)
    ):
        return [None]
    needed: list[mathopt.Variable | None] = [following[s]] if s in following else []
    readers = (build.table.writer[s],) if s in build.states else build.table.readers[s]
    return needed + [build.r[k][c] for c in readers if c > j and c in build.r[k]]
