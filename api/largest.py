"""The largest size that fits under a budget.

The formula of a region is solved exactly; its answer is checked against the exact peak at that size and at
the next, and moved until the former fits and the latter does not. Where the answer lies outside the region,
the region that has it is asked. So the answer n fits and n + 1 does not, by the predicted peak; if the peak
is not monotone in the size, some smaller size may not fit, or some larger one may. Sizes at which the step
cannot run (longer than a table of positions, no multiple of a block) do not fit.
"""

from collections.abc import Callable, Mapping

import sympy

from remat.ir import RematError, positive
from remat.ir.domain import bound
from remat.passes.formula_solve import MOST, last
from remat.passes.formula_solve import largest as solve

_CANNOT_RUN = (RuntimeError, ValueError, IndexError, RematError)
"""What a model raises at sizes that it does not take."""
_NEAR = 8
"""Sizes below the formula's that are tried one by one."""


def largest_fit(
    name: str,
    budget: int,
    sizes: Mapping[str, int],
    peak_formula: Callable[[Mapping[str, int]], sympy.Expr],
    peak_at: Callable[[Mapping[str, int]], int],
) -> int:
    """The largest value of `name` whose peak is at most `budget`; 0 if 1 does not fit.

    Args:
        name: of the size that is looked for.
        budget: bytes.
        sizes: all names with their values; that of `name` is where the search begins.
        peak_formula: of the region that has these sizes.
        peak_at: exact bytes at sizes.

    Raises:
        ValueError: the peak does not depend on it.
    """

    def fits(value: int) -> bool:
        try:
            return peak_at({**sizes, name: value}) <= budget
        except _CANNOT_RUN:
            return False

    guess = _by_formula(name, budget, sizes, peak_formula)
    step, tries = 1, 0
    while guess > 0 and not fits(guess):
        guess = (guess - 1) // step * step  # to multiples, which may be all that runs
        tries += 1
        step *= 1 if tries < _NEAR else 2
    low, high = guess, guess + 1
    step = 1
    while high <= MOST and fits(high):
        low, step = high, 2 * step
        high = low + step
    return last(fits, low, high)


def _by_formula(
    name: str,
    budget: int,
    sizes: Mapping[str, int],
    peak_formula: Callable[[Mapping[str, int]], sympy.Expr],
) -> int:
    """What the formula of the region that the answer lies in says; of a few tries, the last."""
    others = bound({n: v for n, v in sizes.items() if n != name})
    guess = sizes[name]
    seen: list[int] = []
    while guess not in seen:
        seen.append(guess)
        if guess == 1:  # has a region of its own, whose formula is a number
            break
        try:
            peak = peak_formula({**sizes, name: guess})
        except _CANNOT_RUN:
            break
        found = solve(peak, positive(name), others, budget)
        guess = min(MOST, max(1, found or 1))
    return guess
