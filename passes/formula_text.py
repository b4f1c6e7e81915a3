"""Formulas for people: common factors gathered, what all terms of a `Max` share in front of it.

The text means the same as the expression: it is only rearranged.
"""

from functools import reduce

import sympy
from sympy.printing.str import StrPrinter

from .formula import terms_of


class _Printer(StrPrinter):  # type: ignore[misc]  # sympy has no types here
    """Numbers with commas, and short multiplication signs."""

    def _print_Integer(self, expr: sympy.Integer) -> str:
        return f"{int(expr):,}"

    def _print_Mul(self, expr: sympy.Mul) -> str:
        text: str = super()._print_Mul(expr)
        return text.replace("*", "·").replace("··", "**")


def to_text(expr: sympy.Expr) -> str:
    """The expression as a line of text, such as ``497,759,232 + Max(8·batch·seq, 4,096)``."""
    shared, rest = _shared(expr)
    printer = _Printer({"order": "grlex"})
    parts = [printer.doprint(gathered(shared))] if shared != 0 else []
    if rest:
        members = ", ".join(printer.doprint(gathered(each)) for each in rest)
        parts.append(f"Max({members})")
    return " + ".join(parts) if parts else "0"


def to_latex(expr: sympy.Expr) -> str:
    """The expression in LaTeX, with names upright."""
    shared, rest = _shared(expr)
    names = {s: rf"\mathrm{{{s}}}".replace("_", r"\_") for s in expr.free_symbols}
    parts = [sympy.latex(gathered(shared), symbol_names=names)] if shared != 0 else []
    if rest:
        members = r",\; ".join(sympy.latex(gathered(each), symbol_names=names) for each in rest)
        parts.append(rf"\max\left({members}\right)")
    return " + ".join(parts) if parts else "0"


def gathered(expr: sympy.Expr) -> sympy.Expr:
    """A polynomial as a constant and a product of what its other terms have in common."""
    expanded = sympy.expand(expr)
    constant, rest = expanded.as_coeff_Add()
    common = sympy.factor_terms(rest)
    return (
        sympy.Add(constant, common, evaluate=False)
        if constant != 0 and rest != 0
        else common + constant
    )


def _shared(expr: sympy.Expr) -> tuple[sympy.Expr, tuple[sympy.Expr, ...]]:
    """What all terms have in common, and the terms without it (none if there is one term only)."""
    terms = [sympy.expand(term).as_coefficients_dict() for term in terms_of(expr)]
    if len(terms) == 1:
        return sympy.expand(expr), ()
    products = reduce(lambda a, b: [p for p in a if p in b], map(list, terms))
    shared = {p: min(term[p] for term in terms) for p in products}
    shared = {p: c for p, c in shared.items() if c > 0}
    rest = [
        sympy.Add(*(c * p for p, c in term.items()), *(-c * p for p, c in shared.items()))
        for term in terms
    ]
    return sympy.Add(*(c * p for p, c in shared.items())), tuple(rest)
