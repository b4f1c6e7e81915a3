"""Shorten a schedule without leaving the budget.

`prune` removes the repetitions that nobody reads. `drop_repetitions` removes those that are not worth
making because what they write could have been kept: it needs no search, only the bytes at every
execution, and never makes a schedule worse.
"""

from collections.abc import Sequence

from .evaluate import evaluate
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
        shorter = _without_one(problem, current)
        if not shorter:
            return current
        current = shorter


def _without_one(problem: Problem, schedule: tuple[int, ...]) -> tuple[int, ...]:
    """The schedule without one repetition, or an empty one if each of them is needed."""
    total = evaluate(problem, schedule).bytes
    for position, idle in _repetitions(problem, schedule):
        extra = 0
        fits = True
        waiting = sorted(idle, reverse=True)
        # What the repetition writes would instead stay from its last read before until here.
        for p in range(waiting[-1][0] + 1 if waiting else position, position):
            while waiting and waiting[-1][0] < p:
                extra += waiting.pop()[1]
            if total[p] + extra > problem.budget:
                fits = False
                break
        if fits:
            shorter = prune(problem, schedule[:position] + schedule[position + 1 :])
            if evaluate(problem, shorter).feasible:
                return shorter
    return ()


def _repetitions(
    problem: Problem, schedule: tuple[int, ...]
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Repetitions, dearest first: position and, per storage written, (last use before, size)."""
    last_use = [-1] * len(problem.sizes)
    seen = 0
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for position, v in enumerate(schedule):
        op = problem.ops[v]
        for s in op.reads:
            last_use[s] = position
        if v < seen:
            found.append((position, [(last_use[s], problem.sizes[s]) for s in op.writes]))
        seen = max(seen, v + 1)
        for s in op.writes:
            last_use[s] = position
    return sorted(found, key=lambda item: (-problem.ops[schedule[item[0]]].cost, -item[0]))
