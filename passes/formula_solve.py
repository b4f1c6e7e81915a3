"""The largest value of one symbol for which an expression stays under a limit.

Exact, whether or not the expression is monotone. A member of the `Max` that is a polynomial p crosses the
limit at real roots of p - limit only; so the largest n that fits is the greatest value looked at, or lies
next to a root. `floor`, `ceiling`, `Mod` and an inner `Max` are bracketed by their bounds: the largest n by
the upper bound fits, above the largest n by the lower bound nothing does, and between all are tried
(beyond `_SCAN` of them, they are bisected as if the expression were monotone there, and so is what has no
such bounds).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import sympy

from .formula import terms_of
from .formula_bounds import factors

MOST = 10**9
"""No larger value is looked at."""
_SCAN = 100_000
_STEPS = (sympy.floor, sympy.ceiling, sympy.Max, sympy.Mod)


def largest(
    expr: sympy.Expr, symbol: sympy.Symbol, others: Mapping[sympy.Symbol, int], limit: int
) -> int | None:
    """The largest n from 1 to `MOST` with ``expr(n) <= limit``; None if there is none.

    Smaller n may not fit if the expression is not monotone.

    Args:
        expr: bytes.
        symbol: the one that n stands for.
        others: values of all other symbols.
        limit: bytes.

    Raises:
        ValueError: the expression does not depend on the symbol.
    """
    terms = [term.subs(others) for term in terms_of(expr)]
    if not any(term.has(symbol) for term in terms):
        raise ValueError(f"the peak does not depend on {symbol}: {expr}")

    def fits(n: int) -> bool:
        found = [term.subs(symbol, n) for term in terms]
        return all(each.is_finite is not False and each <= limit for each in found)

    if all(term.is_polynomial(symbol) for term in terms):
        return largest_polynomial(terms, symbol, limit)
    upper = [_without_steps(term, upper=True) for term in terms]
    lower = [_without_steps(term, upper=False) for term in terms]
    if not all(bound.is_polynomial(symbol) for bound in (*upper, *lower)):
        return last(fits, 0, MOST + 1) or None
    surely = largest_polynomial(upper, symbol, limit) or 0
    at_most = largest_polynomial(lower, symbol, limit)
    if at_most is None:
        return None
    if at_most - surely <= _SCAN:
        return next((n for n in range(at_most, surely, -1) if fits(n)), surely or None)
    # Too many to try: steps this large are taken to be monotone.
    return last(fits, surely, at_most + 1) or None


def last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last n from `low` (which is taken to fit) to below `high` that fits, if no later one does."""
    return low + bisect_left(range(low + 1, high), True, key=lambda n: not fits(n))


def largest_polynomial(
    terms: Sequence[sympy.Expr], symbol: sympy.Symbol, limit: int
) -> int | None:
    """The largest n with all polynomials at most `limit`."""
    return next(
        (
            n
            for n in _candidates(terms, symbol, limit)
            if all(term.subs(symbol, n) <= limit for term in terms)
        ),
        None,
    )


def _candidates(terms: Sequence[sympy.Expr], symbol: sympy.Symbol, limit: int) -> list[int]:
    """Where the largest n can be, the largest first."""
    found = {MOST, 1}
    for term in terms:
        polynomial = sympy.Poly(term - limit, symbol)
        if polynomial.degree() < 1:
            continue
        for (low, high), _ in polynomial.intervals(eps=sympy.Rational(1, 4)):
            for near in range(int(sympy.floor(low)) - 1, int(sympy.ceiling(high)) + 1):
                found.add(near)
    return sorted((n for n in found if 1 <= n <= MOST), reverse=True)


def _without_steps(term: sympy.Expr, *, upper: bool) -> sympy.Expr:
    """A polynomial bound of a term with `floor` and `ceiling`, whose coefficients are taken by sign."""
    total = sympy.S.Zero
    for product, coefficient in sympy.expand(term).as_coefficients_dict().items():
        bound = sympy.S.One
        high = upper is bool(coefficient > 0)
        for base, power in factors(product):
            bound *= _bound(base, high) ** power
        total += coefficient * bound
    return sympy.expand(total)


def _bound(base: sympy.Expr, upper: bool) -> sympy.Expr:
    if isinstance(base, sympy.ceiling):
        return _bound_inside(base.args[0], upper) + (1 if upper else 0)
    if isinstance(base, sympy.Max):  # sizes are not negative
        bounds = [_bound_inside(arg, upper) for arg in base.args]
        return sympy.Add(*bounds) if upper else bounds[-1]
    if isinstance(base, sympy.Mod):
        return _bound_inside(base.args[1], upper) if upper else sympy.S.Zero
    if isinstance(base, sympy.floor):
        return _bound_inside(base.args[0], upper) - (0 if upper else 1)
    return base


def _bound_inside(expr: sympy.Expr, upper: bool) -> sympy.Expr:
    return _without_steps(expr, upper=upper) if expr.has(*_STEPS) else expr
