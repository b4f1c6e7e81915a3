"""Checkmate's mixed-integer program on HiGHS, without anything that makes it faster.

Every op is an instant at which memory is enforced, and an op is executed again at most once between two of
them (Jain et al., MLSys 2020; the rows are those of `solvers/window_model.py` with K = n). Memory while an op
is executed again is not a row of it: a solution that exceeds the budget there is judged by its true peak.

What backward computes is not computed again, as in our own plans. The program has about n² variables, so it
is given to graphs of up to a few hundred ops only.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.step import Step
from remat.solvers import evaluate, prune
from remat.solvers.decode import decode
from remat.solvers.index import index
from remat.solvers.window_model import build_model, solve_model

MOST_OPS = 450
FRACTIONS = (0.8, 0.6, 0.4)
"""Budgets, between the resident bytes and the program's own peak."""
TIME_S = 60.0
"""Of HiGHS, for each budget."""


def checkmate(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A program for each budget at which HiGHS finds a solution in time."""
    if len(step.problem.ops) > MOST_OPS:
        return
    ops = tuple(replace(op, reuse=()) for op in step.problem.ops)
    problem = replace(step.problem, ops=ops)
    table = index(problem)
    peak = evaluate(problem, step.program).peak
    for fraction in FRACTIONS:
        budget = problem.resident + int(fraction * (peak - problem.resident))
        build = build_model(replace(problem, budget=budget), table, step.program)
        answer = solve_model(build, gap=0.0, nodes=10**6, time_s=TIME_S)
        if answer.windows is not None:
            found = prune(problem, decode(problem, table, answer.windows, None))
            yield f"Checkmate {fraction:.1f}", found
