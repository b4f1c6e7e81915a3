"""The peak of a trace as a formula: the `Max` of the bytes at the few instants that can be largest.

Definition. Bytes at an instant are a polynomial in the symbols (positive integers) and in *atoms*: what is
no polynomial, such as ``floor(height/2)``. B *dominates* A if B - A >= 0 for all values. It is proven if all
coefficients of B - A, written in x - 1 for every symbol x and in a - m for every atom a never below m, are
nonnegative; or if they are after atoms are replaced by their bounds (e <= ceiling(e) <= e + 1,
e - 1 <= floor(e) <= e). An instant is left out if another dominates it, or if a mixture of two or three
others does: A <= t B + (1 - t) C implies A <= Max(B, C). Coefficients of atoms of which no m is known must
be equal.

So the `Max` of what is left equals the peak for all positive values. Not used: most mixtures of three
and more, and conditions on the symbols (divisibility, ranges), which could prove more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import sympy
from sympy.polys.domains import QQ
from sympy.polys.rings import PolyElement, ring

from remat.ir import Phase, Trace

from .formula_bounds import atoms_of, factors, lower_bound

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
            for scratch in _branches(instant.scratch):
                distinct.setdefault(level + space.element(scratch), i)
    if not distinct:
        distinct = {resident: -1}
    kept = _undominated(space, list(distinct))
    terms = tuple(Term(space.expression(each), distinct[each]) for each in kept)
    return Formula(maximum([t.expr for t in terms]), terms, space.expression(resident))


def _sizes(trace: Trace) -> list[sympy.Expr]:
    sizes = [block.size for block in trace.blocks]
    sizes += [branch for each in trace.instants for branch in _branches(each.scratch)]
    return list(dict.fromkeys(sizes))


def _branches(scratch: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """What the largest of is the scratch: a + Max(b, c) = Max(a + b, a + c)."""
    return scratch.args if isinstance(scratch, sympy.Max) else (scratch,)


class _Space:
    """Polynomials in which sizes are added, in x - 1 for every symbol x and in a - m for every atom a."""

    def __init__(self, sizes: Sequence[sympy.Expr]) -> None:
        free = [size for size in sizes if not size.is_Integer]
        atoms = {atom for size in free for atom in atoms_of(size)}
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
        known = [lower_bound(generator) for generator in self.generators]
        self.unsigned = [i for i, bound in enumerate(known) if bound is None]
        """Generators that may be negative."""
        self.offsets = [QQ(int(b.p), int(b.q)) if b is not None else QQ(0) for b in known]
        """Generator less this is what a variable of the ring stands for."""
        for i, offset in enumerate(self.offsets):
            self._variables[i] += offset

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
            for base, power in factors(monomial):
                term *= self._variables[self._index[base]] ** power
            total += term
        return total

    def expression(self, element: PolyElement) -> sympy.Expr:
        """The sympy form of a polynomial."""
        bases = [g - _number(m) for g, m in zip(self.generators, self.offsets, strict=True)]
        products = []
        for powers, coefficient in element.terms():
            factors = (base**power for base, power in zip(bases, powers, strict=False))
            products.append(sympy.Mul(_number(coefficient), *factors))
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
                bound = self._bound(i, upper=coefficient < 0)
                if bound is None:
                    return None
                term = term.quo(generators[i]) * bound
            total += term
        return total

    def _bound(self, i: int, *, upper: bool) -> PolyElement | None:
        """A bound without atoms of a generator less its offset."""
        atom = self.generators[i]
        if not isinstance(atom, sympy.ceiling | sympy.floor) or atoms_of(atom.args[0]):
            return self.ring.zero if not upper and i not in self.unsigned else None
        inside = self._converted(atom.args[0]) - self.offsets[i]
        if isinstance(atom, sympy.ceiling):
            return inside + 1 if upper else inside
        return inside if upper else inside - 1

    def dominates(self, high: PolyElement, low: PolyElement) -> bool:
        """Whether ``high >= low`` is proven for all positive values."""
        if self._at_least(high, low):
            return True
        if len(self.generators) == len(self.symbols):
            return False
        bounded = self.lowest(high - low)
        return bounded is not None and self._at_least(bounded, self.zero)

    def _at_least(self, high: PolyElement, low: PolyElement) -> bool:
        """Whether no coefficient of ``high - low`` is negative, or is one of what may be negative."""
        for powers in (*low, *(powers for powers in high if powers not in low)):
            more, less = high.get(powers, 0), low.get(powers, 0)
            if more < less or (more != less and self.has_unsigned(powers)):
                return False
        return True

    def has_unsigned(self, powers: tuple[int, ...]) -> bool:
        """Whether a monomial may be negative."""
        return any(powers[i] for i in self.unsigned)

    def samples(self) -> list[list[float]]:
        """Points that show which terms can be largest: all symbols from small to large, in turn."""
        count = len(self.symbols)
        choices = (
            product(_SAMPLES, repeat=count) if count <= 2 else [(v,) * count for v in _SAMPLES]
        )
        points = []
        for values in choices:
            binding = dict(zip(self.symbols, values, strict=True))
            try:
                at = [float(each.subs(binding)) for each in self.generators]
            except (TypeError, ValueError):  # a quotient of 0, outside the domain
                continue
            points.append([v - float(m) for v, m in zip(at, self.offsets, strict=True)] + [0.0])
        return points


def _number(value: Any) -> sympy.Rational:
    return sympy.Rational(int(value.numerator), int(value.denominator))


def _undominated(space: _Space, elements: Sequence[PolyElement]) -> list[PolyElement]:
    """Those of `elements` whose maximum is that of all, in order."""
    order = {each: i for i, each in enumerate(elements)}
    kept = _largest_somewhere(space, elements)
    for each in elements:
        if each not in kept and not any(space.dominates(other, each) for other in kept):
            if not _mixture(space, each, kept):
                kept = [other for other in kept if not space.dominates(each, other)] + [each]
    for each in sorted(kept, key=lambda e: -order[e]):
        others = [other for other in kept if other != each]
        if _mixture(space, each, others) or _mixture_of_three(space, each, others):
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


def _mixture(space: _Space, low: PolyElement, others: Sequence[PolyElement]) -> bool:
    """Whether a mixture of two of `others` has no coefficient below that of `low`."""
    return any(_between(space, low, b, c) for b, c in combinations(others, 2))


def _mixture_of_three(space: _Space, low: PolyElement, others: Sequence[PolyElement]) -> bool:
    """The same for three, with one of some parts for the third."""
    for third in others:
        rest = [other for other in others if other != third]
        for part in _PARTS:
            mixed = [other * (1 - part) + third * part for other in rest]
            if _mixture(space, low, mixed):
                return True
    return False


def _between(space: _Space, low: PolyElement, b: PolyElement, c: PolyElement) -> bool:
    """Whether some t in [0, 1] has all coefficients of ``t b + (1 - t) c - low`` nonnegative."""
    zero = QQ(0)
    least, most = zero, QQ(1)
    for powers in {**low, **b, **c}:
        at_c = c.get(powers, zero)
        slope = b.get(powers, zero) - at_c
        missing = low.get(powers, zero) - at_c
        if (slope or missing) and space.has_unsigned(powers):
            return False
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
