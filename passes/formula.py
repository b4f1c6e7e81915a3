"""The peak of a trace as a formula: the `Max` of the bytes at the few instants that can be largest.

Definition. Bytes at an instant are a polynomial in the symbols (positive integers) and in *atoms*: what is
no polynomial, such as ``floor(height/2)``. B *dominates* A if B - A >= 0 for all values. It is proven if all
coefficients of B - A, written in x - 1 for every symbol x, are nonnegative; atoms count as
nonnegative, or are replaced by their bounds (e <= ceiling(e) <= e + 1, e - 1 <= floor(e) <= e). An instant
is left out if another dominates it, or if a mixture of two or three others does: A <= t B + (1 - t) C implies
A <= Max(B, C).

So the `Max` of what is left equals the peak for all positive values. Not used: most mixtures of three
and more, and conditions on the symbols (divisibility, ranges), which could prove more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import sympy
from sympy.polys.domains import QQ
from sympy.polys.rings import PolyElement, ring

from remat.ir import Phase, Trace

_PARTS = (QQ(1, 1024), QQ(1, 128), QQ(1, 16), QQ(1, 2))
"""Parts of the third term in a mixture of three."""
_SAMPLES = (1, 3, 20, 200, 2**12, 2**20)
"""Values of a symbol at which terms are compared first."""


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes at one instant that can be the largest."""

    expr: sympy.Expr
    """Bytes."""
    instant: int
    """The first one with so many bytes; -1: before the first."""


@dataclass(frozen=True, slots=True)
class Formula:
    """The peak of a step, or of one of its phases, for all sizes."""

    peak: sympy.Expr
    """Bytes; the `Max` of the terms."""
    terms: tuple[Term, ...]
    resident: sympy.Expr
    """Bytes before the step."""


def formula(trace: Trace, phase: Phase | None = None) -> Formula:
    """The peak of `trace` as a formula.

    Args:
        trace: sizes and scratch are expressions in symbols that are positive integers.
        phase: take only instants of this phase; None for all.
    """
    space = _Space(_sizes(trace))
    change = [space.zero] * (len(trace.instants) + 1)
    resident = space.zero
    for block in trace.blocks:
        size = space.element(block.size)
        first, after = max(block.birth, 0), min(block.death, len(trace.instants) - 1) + 1
        change[first] += size
        change[after] -= size
        if block.birth < 0:
            resident += size
    distinct: dict[PolyElement, int] = {}
    level = space.zero
    for i, instant in enumerate(trace.instants):
        level += change[i]
        if phase is None or instant.phase is phase:
            distinct.setdefault(level + space.element(instant.scratch), i)
    if not distinct:
        distinct = {resident: -1}
    kept = _undominated(space, list(distinct))
    terms = tuple(Term(space.expression(each), distinct[each]) for each in kept)
    return Formula(maximum([t.expr for t in terms]), terms, space.expression(resident))


def _sizes(trace: Trace) -> list[sympy.Expr]:
    sizes = [block.size for block in trace.blocks] + [each.scratch for each in trace.instants]
    return list(dict.fromkeys(sizes))


class _Space:
    """Polynomials in which sizes are added: in x - 1 for every symbol x, and in the atoms."""

    def __init__(self, sizes: Sequence[sympy.Expr]) -> None:
        free = [size for size in sizes if not size.is_Integer]
        atoms = {atom for size in free for atom in _atoms(size)}
        inner = {s for atom in atoms for s in atom.free_symbols}
        symbols = {s for size in free for s in size.free_symbols} | inner
        self.symbols = sorted(symbols, key=str)
        self.generators = [*self.symbols, *sorted(atoms, key=str)]
        # A ring needs a generator; this one occurs nowhere.
        names = [*map(str, range(len(self.generators))), "unused"]
        self.ring, *self._variables = ring([f"x{name}" for name in names], QQ)
        self._index = {generator: i for i, generator in enumerate(self.generators)}
        self._known: dict[sympy.Expr, PolyElement] = {}
        self.zero = self.ring.zero
        for i in range(len(self.symbols)):
            self._variables[i] += 1

    def element(self, size: sympy.Expr) -> PolyElement:
        """A size as a polynomial."""
        if size not in self._known:
            self._known[size] = self._converted(size)
        return self._known[size]

    def _converted(self, size: sympy.Expr) -> PolyElement:
        if size.is_Integer:
            return self.ring(int(size))
        total = self.ring.zero
        for monomial, coefficient in sympy.expand(size).as_coefficients_dict().items():
            term = self.ring(QQ(int(coefficient.p), int(coefficient.q)))
            for base, power in monomial.as_powers_dict().items():
                if base != 1:
                    term *= self._variables[self._index[base]] ** int(power)
            total += term
        return total

    def expression(self, element: PolyElement) -> sympy.Expr:
        """The sympy form of a polynomial."""
        count = len(self.symbols)
        bases = [symbol - 1 for symbol in self.symbols] + self.generators[count:]
        products = []
        for powers, coefficient in element.terms():
            factors = (base**power for base, power in zip(bases, powers, strict=False))
            number = sympy.Rational(int(coefficient.numerator), int(coefficient.denominator))
            products.append(sympy.Mul(number, *factors))
        return sympy.expand(sympy.Add(*products))

    def lowest(self, element: PolyElement) -> PolyElement | None:
        """A lower bound without atoms; None if none is known."""
        count = len(self.symbols)
        generators = self.ring.gens
        total = self.ring.zero
        for powers, coefficient in element.terms():
            term = self.ring.from_dict({powers: coefficient})
            if sum(power > 0 for power in powers[count:]) > 1:
                return (
                    None  # a product of bounds, which may be negative, is no bound of the product
                )
            for i, power in enumerate(powers[count : len(self.generators)], count):
                if not power:
                    continue
                if power > 1:
                    return None
                bound = self._bound(self.generators[i], upper=coefficient < 0)
                if bound is None:
                    return None
                term = term.quo(generators[i]) * bound
            total += term
        return total

    def _bound(self, atom: sympy.Expr, *, upper: bool) -> PolyElement | None:
        if not isinstance(atom, sympy.ceiling | sympy.floor) or _atoms(atom.args[0]):
            return self.ring.zero if not upper else None
        inside = self._converted(atom.args[0])
        if isinstance(atom, sympy.ceiling):
            return inside + 1 if upper else inside
        return inside if upper else inside - 1

    def dominates(self, high: PolyElement, low: PolyElement) -> bool:
        """Whether ``high >= low`` is proven for all positive values."""
        if all(high.get(powers, 0) >= coefficient for powers, coefficient in low.items()) and all(
            powers in low or coefficient > 0 for powers, coefficient in high.items()
        ):
            return True
        if len(self.generators) == len(self.symbols):
            return False
        bounded = self.lowest(high - low)
        return bounded is not None and all(coefficient >= 0 for coefficient in bounded.coeffs())

    def samples(self) -> list[list[float]]:
        """Points that show which terms can be largest: all symbols from small to large, in turn."""
        count = len(self.symbols)
        choices = (
            product(_SAMPLES, repeat=count) if count <= 2 else [(v,) * count for v in _SAMPLES]
        )
        points = []
        for values in choices:
            binding = dict(zip(self.symbols, values, strict=True))
            atoms = [float(atom.subs(binding)) for atom in self.generators[count:]]
            points.append([value - 1.0 for value in values] + atoms + [0.0])
        return points


def _atoms(size: sympy.Expr) -> set[sympy.Expr]:
    """Factors of the terms that are no powers of symbols."""
    return {
        base
        for monomial in sympy.expand(size).as_coefficients_dict()
        for base in monomial.as_powers_dict()
        if base != 1 and not base.is_Symbol
    }


def _undominated(space: _Space, elements: Sequence[PolyElement]) -> list[PolyElement]:
    """Those of `elements` whose maximum is that of all, in order."""
    order = {each: i for i, each in enumerate(elements)}
    kept = _largest_somewhere(space, elements)
    for each in elements:
        if each not in kept and not any(space.dominates(other, each) for other in kept):
            if not _mixture(each, kept):
                kept = [other for other in kept if not space.dominates(each, other)] + [each]
    for each in sorted(kept, key=lambda e: -order[e]):
        others = [other for other in kept if other != each]
        if _mixture(each, others) or _mixture_of_three(each, others):
            kept = others
    return sorted(kept, key=order.__getitem__)


def _largest_somewhere(space: _Space, elements: Sequence[PolyElement]) -> list[PolyElement]:
    """The largest element at each sample, by rounded numbers: what is not found is only slower to prune."""
    terms = [
        [(powers, float(coefficient)) for powers, coefficient in element.items()]
        for element in elements
    ]
    found: dict[PolyElement, None] = {}
    for point in space.samples():
        values: dict[tuple[int, ...], float] = {}
        for powers in {powers: None for element in terms for powers, _ in element}:
            values[powers] = prod(x**power for x, power in zip(point, powers, strict=True))
        sums = [sum(c * values[powers] for powers, c in element) for element in terms]
        found[elements[sums.index(max(sums))]] = None
    return list(found)


def _mixture(low: PolyElement, others: Sequence[PolyElement]) -> bool:
    """Whether a mixture of two of `others` has no coefficient below that of `low`."""
    return any(_between(low, b, c) for b, c in combinations(others, 2))


def _mixture_of_three(low: PolyElement, others: Sequence[PolyElement]) -> bool:
    """The same for three, with one of some parts for the third."""
    for third in others:
        rest = [other for other in others if other != third]
        for part in _PARTS:
            mixed = [other * (1 - part) + third * part for other in rest]
            if _mixture(low, mixed):
                return True
    return False


def _between(low: PolyElement, b: PolyElement, c: PolyElement) -> bool:
    """Whether some t in [0, 1] has all coefficients of ``t b + (1 - t) c - low`` nonnegative."""
    zero = QQ(0)
    least, most = zero, QQ(1)
    for powers in {**low, **b, **c}:
        at_c = c.get(powers, zero)
        slope = b.get(powers, zero) - at_c
        missing = low.get(powers, zero) - at_c
        if slope > 0:
            least = max(least, missing / slope)
        elif slope < 0:
            most = min(most, missing / slope)
        elif missing > 0:
            return False
        if least > most:
            return False
    return True


def terms_of(peak: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """The members of a `Max`, or the expression itself."""
    return tuple(peak.args) if isinstance(peak, sympy.Max) else (peak,)


def largest_of(formulas: Iterable[Formula]) -> sympy.Expr:
    """The larger of several peaks, without terms that others dominate."""
    terms = [term.expr for each in formulas for term in each.terms]
    space = _Space(list(dict.fromkeys(terms)))
    elements = dict.fromkeys(map(space.element, terms))
    return maximum([space.expression(each) for each in _undominated(space, list(elements))])


def maximum(terms: Sequence[sympy.Expr]) -> sympy.Expr:
    """Their `Max`, as it is written: evaluated, sympy would compare them, at length."""
    return sympy.Max(*terms, evaluate=False) if len(terms) > 1 else terms[0]
