"""The least value of an expression in sizes, for all positive integers.

Definition. The expression is written as a polynomial in ``x - 1`` for every symbol x, and in ``a - m`` for
every *atom* a (what is no polynomial, such as ``floor((n - 9)/2)``) with its own least value m. If all
coefficients but the constant are nonnegative, the constant is a lower bound, and the least value if no atom
is involved.

Not handled: expressions that decrease in a symbol, atoms with other functions than `floor`, `ceiling`,
`Max`, `Min` and `Mod`. Their bound is unknown.
"""

import sympy


def atoms_of(expr: sympy.Expr) -> set[sympy.Expr]:
    """Factors of the terms of an expression that are no powers of symbols."""
    return {
        base
        for monomial in sympy.expand(expr).as_coefficients_dict()
        for base in monomial.as_powers_dict()
        if base != 1 and not base.is_Symbol
    }


def lower_bound(expr: sympy.Expr) -> sympy.Rational | None:
    """A number that `expr` is never below; None if none is known."""
    known = _bound_of_atom(expr)
    if known is not None:
        return known
    shift: dict[sympy.Expr, sympy.Expr] = {s: sympy.Dummy() + 1 for s in expr.free_symbols}
    for atom in atoms_of(expr):
        least = None if atom == expr else lower_bound(atom)
        if least is None:
            return None
        shift[atom] = sympy.Dummy() + least
    terms = sympy.expand(sympy.expand(expr).xreplace(shift)).as_coefficients_dict()
    constant: sympy.Rational = terms.pop(sympy.S.One, sympy.S.Zero)
    return constant if all(coefficient >= 0 for coefficient in terms.values()) else None


def _bound_of_atom(atom: sympy.Expr) -> sympy.Rational | None:
    if isinstance(atom, sympy.Mod):
        return sympy.S.Zero
    if not isinstance(atom, sympy.floor | sympy.ceiling | sympy.Max | sympy.Min):
        return None
    bounds = [lower_bound(arg) for arg in atom.args]
    known = [bound for bound in bounds if bound is not None]
    if isinstance(atom, sympy.Max):
        return max(known, default=None)
    if len(known) < len(bounds):
        return None
    return atom.func(*known)
