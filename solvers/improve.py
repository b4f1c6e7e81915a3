"""Shorten a schedule without leaving the budget.

`prune` removes the repetitions that nobody reads. `drop_repetitions` removes those that are not worth
making because what they write could have been kept: it needs no search, only the bytes at every
execution, and never makes a schedule worse.
"""

from collections.abc import Mapping, Sequence

from .evaluate import Instance, evaluate, instances
from .problem import Problem


def prune(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    """Leave out every repetition of which no write is read.

    One sweep from the end finds them all: a read counts only if the reader itself stays.
    """
    count = [0] * len(problem.ops)
    for v in schedule:
        count[v] += 1
    wanted = [False] * len(problem.sizes)
    kept: list[int] = []
    for v in reversed(schedule):
        op = problem.ops[v]
        count[v] -= 1
        if count[v] and not any(wanted[s] for s in op.writes):
            continue
        kept.append(v)
        for s in op.writes:
            wanted[s] = False
        for s in op.reads:
            wanted[s] = True
    return tuple(reversed(kept))


def drop_repetitions(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    """Leave out repetitions, dearest first, as long as the schedule still fits the budget."""
    current = prune(problem, schedule)
    while True:
        shorter = prune(problem, _sweep(problem, current))
        if len(shorter) == len(current) or not evaluate(problem, shorter).feasible:
            return current
        current = shorter


def _sweep(problem: Problem, schedule: tuple[int, ...]) -> tuple[int, ...]:
    """Try every repetition once; what it wrote would stay from its last read before until then.

    The bytes are kept up to date from above: that the reads of a repetition end with it is not counted.
    """
    total = list(evaluate(problem, schedule).bytes)
    lives: list[list[Instance]] = [[] for _ in problem.sizes]
    written: list[list[Instance]] = [[] for _ in schedule]
    for instance in instances(problem, schedule):
        lives[instance.storage].append(instance)
        written[instance.birth].append(instance)
    left_out: set[int] = set()
    banned = {s: schedule.index(v) for v, op in enumerate(problem.ops) for s in op.absent}
    for position in _repetitions(problem, schedule):
        merged = [(lives[x.storage][lives[x.storage].index(x) - 1], x) for x in written[position]]
        if any(_is_read(x) and _covers(before, x, banned) for before, x in merged):
            continue
        # (last position before the extra bytes begin, bytes), the latest first
        waiting = sorted(
            ((before.death, problem.sizes[x.storage]) for before, x in merged if _is_read(x)),
            reverse=True,
        )
        raised = _raised(total, waiting, position, problem.budget)
        if raised is None:
            continue
        total[position - len(raised) : position] = raised
        left_out.add(position)
        for before, x in merged:
            lives[x.storage].remove(x)
            if _is_read(x) and x.death >= before.death:
                before.death, before.reused = x.death, x.reused
    return tuple(v for position, v in enumerate(schedule) if position not in left_out)


def _covers(before: Instance, after: Instance, banned: Mapping[int, int]) -> bool:
    """Kept from one instance to the other, the storage would be there where it must be absent."""
    return before.birth <= banned.get(before.storage, -1) <= after.death


def _is_read(instance: Instance) -> bool:
    return instance.death > instance.birth or instance.reused


def _raised(
    total: list[int], waiting: list[tuple[int, int]], end: int, budget: int
) -> list[int] | None:
    """The bytes before position `end` with what waits added; None if they exceed the budget."""
    raised: list[int] = []
    extra = 0
    for p in range(waiting[-1][0] + 1 if waiting else end, end):
        while waiting and waiting[-1][0] < p:
            extra += waiting.pop()[1]
        raised.append(total[p] + extra)
        if raised[-1] > budget:
            return None
    return raised


def _repetitions(problem: Problem, schedule: tuple[int, ...]) -> list[int]:
    """Positions of the executions that are not first: dearest first, then latest first."""
    found: list[int] = []
    seen = 0
    for position, v in enumerate(schedule):
        if v < seen:
            found.append(position)
        seen = max(seen, v + 1)
    return sorted(found, key=lambda position: (-problem.ops[schedule[position]].cost, -position))
