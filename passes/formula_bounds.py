"""The least value of an expression in sizes, for all positive integers.

Definition. The expression is written as a polynomial in ``x - 1`` for every symbol x, and in ``a - m`` for
every *atom* a (what is no polynomial, such as ``floor((n - 9)/2)``) with its own least value m. If all
coefficients but the constant are nonnegative, the constant is a lower bound.

Not handled: expressions that decrease in a symbol, atoms with other functions than `floor`, `ceiling`,
`Max`, `Min`, `Mod` and quotients. Their bound is unknown.
"""

import sympy


def factors(monomial: sympy.Expr) -> list[tuple[sympy.Expr, int]]:
    """Symbols and atoms in a product, with their powers, which are positive integers."""
    return [
        (base, int(power)) if power.is_Integer and power > 0 else (base**power, 1)
        for base, power in monomial.as_powers_dict().items()
        if base != 1
    ]


def atoms_of(expr: sympy.Expr) -> set[sympy.Expr]:
    """Factors of the terms of an expression that are no symbols."""
    monomials = sympy.expand(expr).as_coefficients_dict()
    found = {base for monomial in monomials for base, _ in factors(monomial)}
    return {base for base in found if not base.is_Symbol}


def lower_bound(expr: sympy.Expr) -> sympy.Rational | None:
    """A number that `expr` is never below; None if none is known."""
    if isinstance(expr, sympy.Mod):
        return sympy.S.Zero
    if isinstance(expr, sympy.Pow) and not (expr.exp.is_Integer and expr.exp > 0):
        base = lower_bound(expr.base)
        return sympy.S.Zero if base is not None and base >= 0 else None
    if isinstance(expr, sympy.floor | sympy.ceiling | sympy.Max | sympy.Min):
        return _bound_of_function(expr)
    return _bound_of_sum(expr)


def _bound_of_function(expr: sympy.Expr) -> sympy.Rational | None:
    bounds = [lower_bound(arg) for arg in expr.args]
    known = [bound for bound in bounds if bound is not None]
    if isinstance(expr, sympy.Max):
        return max(known, default=None)
    return expr.func(*known) if len(known) == len(bounds) else None


def _bound_of_sum(expr: sympy.Expr) -> sympy.Rational | None:
    above: dict[sympy.Expr, sympy.Expr] = {}
    total = sympy.S.Zero
    for monomial, coefficient in sympy.expand(expr).as_coefficients_dict().items():
        term = coefficient
        for base, power in factors(monomial):
            least = sympy.S.One if base.is_Symbol else lower_bound(base)
            if least is None:
                return None
            term *= (above.setdefault(base, sympy.Dummy()) + least) ** power
        total += term
    terms = sympy.expand(total).as_coefficients_dict()
    constant: sympy.Rational = terms.pop(sympy.S.One, sympy.S.Zero)
    return constant if all(coefficient >= 0 for coefficient in terms.values()) else None
