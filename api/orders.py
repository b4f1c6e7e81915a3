"""The orders in which a captured step may run, and which of them to plan in.

There are two: as it was captured, and arranged so that the least is alive with nothing repeated. Orders of
one program have different bounds, and a plan's bound is for its own. Only the chosen one is solved; which
one, is decided by what is quick to find. If the program fits without repeating anything in one of them, that
is it. Otherwise the peak with nothing repeated decides: how much of it is above the budget is what has to be
recomputed. On the models of the test zoo the order with the smaller one was never dearer by more than the
gap, and up to 1.2 points of step time cheaper. Among equals, the smaller least peak decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.passes import Index, Ledger, Prepared, find_order, reorder_step
from remat.solvers import (
    Limits,
    Problem,
    Solution,
    evaluate,
    forced_bytes,
    least_peak,
    solve_windows,
)

Formulated = Callable[[Prepared], tuple[Problem, Index]]


@dataclass(frozen=True, slots=True)
class Arranged:
    """A step in one order."""

    prepared: Prepared
    problem: Problem
    index: Index
    peak: int
    """With nothing repeated, bytes."""
    least: Solution
    """The schedule of least peak that was found."""
    changed: bool
    """The order is not that of the captured program."""


def arranged(prepared: Prepared, formulated: Formulated, limits: Limits) -> list[Arranged]:
    """The step as it was captured and, if that differs, with its ops ordered for memory.

    Args:
        prepared: the captured step.
        formulated: makes the problem of a step.
        limits: of the search for the least peaks of both together.
    """
    limits = replace(limits, time_s=limits.time_s / 2)
    found = [_arranged(prepared, formulated, limits, changed=False)]
    first = found[0]
    permutation = find_order(prepared, first.problem, first.index)
    if permutation != tuple(range(len(permutation))):
        other = reorder_step(prepared, first.index, permutation)
        found.append(_arranged(other, formulated, limits, changed=True))
    return found


def _arranged(
    prepared: Prepared, formulated: Formulated, limits: Limits, *, changed: bool
) -> Arranged:
    problem, index = formulated(prepared)
    least = least_peak(problem, limits)
    return Arranged(prepared, problem, index, identity_peak(problem), least, changed)


def identity_peak(problem: Problem) -> int:
    """Bytes at the peak with nothing repeated."""
    return evaluate(problem, range(len(problem.ops))).peak


def choose(candidates: Sequence[Arranged]) -> Arranged:
    """The order to plan in, under the budget of the problems; as captured among equals.

    Args:
        candidates: at least one.
    """
    budget = candidates[0].problem.budget
    as_is = [c for c in candidates if c.peak <= budget]
    possible = [c for c in candidates if c.least.peak <= budget]
    return min(as_is[:1] or possible or candidates, key=lambda c: (c.peak, c.least.peak))


def least_of(candidates: Sequence[Arranged]) -> Arranged:
    """The order with the least peak; as captured among equals."""
    return min(candidates, key=lambda c: c.least.peak)


def searched(candidates: Sequence[Arranged], limits: Limits) -> list[Arranged]:
    """The same, looked at for longer: for smaller peaks, and then for what fits the budget of the problems.

    Args:
        candidates: from `arranged`.
        limits: of each of the two searches, for all candidates together.
    """
    share = replace(limits, time_s=limits.time_s / 2)
    found: list[Arranged] = []
    for known in candidates:
        candidate = replace(known, least=least_peak(known.problem, share))
        budget = candidate.problem.budget
        if max(forced_bytes(candidate.problem)) <= budget < candidate.least.peak:
            solution = solve_windows(candidate.problem, share)
            candidate = replace(candidate, least=solution) if solution.schedule else candidate
        found.append(candidate)
    return found


def least_bound(candidates: Sequence[Arranged]) -> int:
    """Bytes that no schedule of any of the orders can avoid."""
    return min(max(forced_bytes(c.problem)) for c in candidates)


def ledger(
    captured: Arranged, chosen: Arranged, planned: int, optimizer_peak: int, beside: int
) -> Ledger:
    """What order, reuse and recomputation each gave.

    Args:
        captured: the step as it was captured.
        chosen: the step in the plan's order.
        planned: peak of the plan, bytes.
        optimizer_peak: of the optimizer step, bytes, which none of the three changes.
        beside: bytes that other forwards leave under the plan.
    """

    def peak(problem: Problem, *, in_place: bool) -> int:
        ops = (replace(op, absent=(), reuse=op.reuse if in_place else ()) for op in problem.ops)
        return max(identity_peak(replace(problem, ops=tuple(ops))) + beside, optimizer_peak)

    return Ledger(
        captured=peak(captured.problem, in_place=False),
        ordered=peak(chosen.problem, in_place=False),
        in_place=peak(chosen.problem, in_place=True),
        planned=planned,
    )
