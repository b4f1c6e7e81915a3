"""Scratch as a formula: polynomials in the symbols, fitted to what kernels were measured to take.

Definition. For one call with symbolic sizes let m_1 .. m_k be the products of symbols that divide the
least common multiple of the products in its operands' sizes (also with every symbol once more). The
scratch of the call is a combination of m_1 .. m_k with rational coefficients, or the larger of one and a
constant, if one exists that equals the measured bytes at all sampled bindings, of which there are at
least `SPARE` more than coefficients. If there is none (a kernel that takes another path at some sizes, or
rounds), it is a *reserve*, not below any sample: the combination that equals all but the least samples, or
else the least multiple of the largest m.

Samples lie around the example. Nothing is proven beyond them: kernels may change their ways at other
sizes, so whoever needs exact bytes at one binding measures there (`measure_scratch`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import ceil

import sympy
from sympy.polys.domains import QQ
from sympy.polys.matrices import DomainMatrix

from .memory import at_binding
from .realize import Call, call_key, specs
from .scratch import Origin, measure_scratch

SPARE = 4
"""Samples beyond the number of coefficients."""
_MOST = 24
"""Samples of one call."""
_SMALL = 32
_LIMIT = 2**30
"""Bytes of arguments and results up to which a sample is taken."""

Binding = Mapping[sympy.Symbol, int]


@dataclass(frozen=True, slots=True)
class FittedScratch:
    """Scratch of one call at all sizes."""

    bytes: sympy.Expr
    origin: Origin


def fit_scratch(
    calls: Sequence[Call], symbols: Binding, domain: Sequence[sympy.Basic] = ()
) -> tuple[FittedScratch, ...]:
    """Scratch of every call as an expression.

    Args:
        calls: described, in the symbols of `symbols`.
        symbols: the example: every symbol and its value.
        domain: conditions on the symbols; only bindings that fulfil them are sampled.
    """
    points = samples(symbols, domain)
    keys = [call_key(call) for call in calls]
    distinct = dict(zip(keys, calls, strict=True))
    changing = {key: call for key, call in distinct.items() if _free(call)}
    constant = [key for key in distinct if key not in changing]
    found = dict(zip(constant, _constants([distinct[key] for key in constant]), strict=True))
    first = _measured(list(changing.values()), points[:3])
    some = {
        key: call
        for (key, call), taken in zip(changing.items(), first, strict=True)
        if any(taken) or None in taken
    }
    for key in changing:
        found[key] = FittedScratch(sympy.S.Zero, Origin.FITTED)
    rest = _measured(list(some.values()), points)
    for (key, call), taken in zip(some.items(), rest, strict=True):
        found[key] = _fit(call, points, taken)
    return tuple(found[key] for key in keys)


def samples(symbols: Binding, domain: Sequence[sympy.Basic]) -> list[dict[sympy.Symbol, int]]:
    """Bindings around the example, the example first; all of them within the domain."""
    if not symbols:
        return [{}]
    choices = [_values(value) for value in symbols.values()]
    mixed = sorted(product(*map(range, map(len, choices))), key=_scattered)
    points = [dict(symbols)]
    for indices in mixed:
        picked = [choice[i] for choice, i in zip(choices, indices, strict=True)]
        point = dict(zip(symbols, picked, strict=True))
        if point not in points and all(bool(condition.subs(point)) for condition in domain):
            points.append(point)
        if len(points) == _MOST:
            break
    return points


def _scattered(indices: tuple[int, ...]) -> tuple[int, int]:
    """Order that varies all symbols from the beginning."""
    mixed = 0
    for i in indices:
        mixed = (mixed * 31 + i * 17 + 7) % 101
    return mixed, sum(indices)


def _values(example: int) -> list[int]:
    if example <= _SMALL:
        near = [example + 1, example + 3, 2 * example, 3 * example + 1, 4 * example]
        near += [2, 3, 5, 7, 11, 13]
    else:
        near = [example - 1, example // 2, example // 2 + 3, example // 3, example // 4 + 1]
    return list(dict.fromkeys([example, *(value for value in near if value > 1)]))


def _free(call: Call) -> set[sympy.Symbol]:
    sizes = [size for spec in specs(call) for size in (*spec.shape, spec.storage_bytes)]
    found = {s for size in sizes if isinstance(size, sympy.Expr) for s in size.free_symbols}
    for leaf in (*call.args, *call.kwargs.values()):
        for item in leaf if isinstance(leaf, list | tuple) else (leaf,):
            if isinstance(item, sympy.Expr):
                found |= item.free_symbols
    return found


def _constants(calls: Sequence[Call]) -> list[FittedScratch]:
    return [
        FittedScratch(sympy.Integer(each.bytes), each.origin) for each in measure_scratch(calls)
    ]


def _measured(
    calls: Sequence[Call], points: Sequence[Mapping[sympy.Symbol, int]]
) -> list[list[int | None]]:
    """Per call: bytes at every point; None where they could not be measured."""
    columns = [measure_scratch(calls, point, _LIMIT) for point in points]
    return [
        [None if s.origin is Origin.UNKNOWN else s.bytes for s in row]
        for row in zip(*columns, strict=True)
    ]


def _fit(
    call: Call, points: Sequence[Mapping[sympy.Symbol, int]], taken: Sequence[int | None]
) -> FittedScratch:
    known = [(point, size) for point, size in zip(points, taken, strict=True) if size is not None]
    if not known:
        return FittedScratch(sympy.S.Zero, Origin.UNKNOWN)
    symbols = sorted(_free(call), key=str)
    top = _top(call, symbols)
    bases = [products(symbols, [degree + extra for degree in top]) for extra in (0, 1)]
    for basis in bases:
        exact = interpolated(basis, known)
        if exact is not None:
            return FittedScratch(exact, Origin.FITTED)
    least = min(size for _, size in known)
    for basis in bases:
        rest = interpolated(basis, [each for each in known if each[1] > least])
        if rest is None:
            continue
        below = [at_binding(rest, point) for point, size in known if size == least]
        if max(below) <= least:
            return FittedScratch(sympy.Max(least, rest), Origin.FITTED)
        if min(below) >= least:
            return FittedScratch(rest, Origin.RESERVED)
    largest = products(symbols, top)[-1]
    factor = max(ceil(Fraction(size, at_binding(largest, point))) for point, size in known)
    return FittedScratch(factor * largest, Origin.RESERVED)


def _top(call: Call, symbols: Sequence[sympy.Symbol]) -> list[int]:
    """Highest power of every symbol in the operands' sizes."""
    sizes = [sympy.sympify(spec.storage_bytes) for spec in specs(call)]
    polynomials = [sympy.expand(size) for size in sizes]
    return [
        max((_degree(size, symbol) for size in polynomials), default=1) or 1 for symbol in symbols
    ]


def _degree(size: sympy.Expr, symbol: sympy.Symbol) -> int:
    return int(sympy.degree(size, symbol)) if size.is_polynomial(symbol) and size != 0 else 1


def products(symbols: Sequence[sympy.Symbol], top: Sequence[int]) -> list[sympy.Expr]:
    """All products of powers up to `top`, the largest last."""
    powers = product(*(range(degree + 1) for degree in top))
    return [
        sympy.prod(s**p for s, p in zip(symbols, each, strict=True))
        for each in sorted(powers, key=lambda each: (sum(each), each))
    ]


def interpolated(
    basis: Sequence[sympy.Expr], known: Sequence[tuple[Mapping[sympy.Symbol, int], int]]
) -> sympy.Expr | None:
    """The combination of `basis` that equals every sample; None if there is none."""
    if len(known) < len(basis) + SPARE:
        return None
    rows = [[QQ(at_binding(each, point)) for each in basis] + [QQ(size)] for point, size in known]
    reduced, pivots = DomainMatrix(rows, (len(rows), len(basis) + 1), QQ).rref()
    if len(basis) in pivots:
        return None
    column = reduced.to_Matrix()[:, len(basis)]
    return sum((column[i] * basis[p] for i, p in enumerate(pivots)), sympy.S.Zero)
