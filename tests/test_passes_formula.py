"""The peak formula equals the profile at every binding, whatever was left out of it."""

from itertools import pairwise

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.ir import Block, Instant, Phase, Role, Trace
from remat.passes import profile
from remat.passes.formula import formula
from remat.passes.formula_solve import largest
from remat.passes.formula_text import gathered, to_latex, to_text

B, S = (sympy.Symbol(name, positive=True, integer=True) for name in ("batch", "seq"))
NEGATIVE = (sympy.floor((S - 9) / 2), 7 * B * sympy.floor((20 - S) / 3), sympy.floor(B / 2) - 1)
"""No sizes of memory where they are negative, but a term that holds one must not be left out for it."""
ATOMS = (sympy.ceiling(B * S / 3), sympy.floor(S / 2), sympy.ceiling(B / 2) * S, *NEGATIVE)


@st.composite
def sizes(draw: st.DrawFn) -> sympy.Expr:
    polynomial = sum(
        draw(st.integers(0, 9)) * product for product in (sympy.S.One, B, S, B * S, B * S**2)
    )
    return sympy.sympify(polynomial + draw(st.integers(0, 3)) * draw(st.sampled_from(ATOMS)))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 12))
    instants = tuple(
        Instant(f"op_{i}", "aten.op", Phase.FORWARD, draw(sizes())) for i in range(count)
    )
    blocks = []
    for i in range(draw(st.integers(1, 15))):
        birth = draw(st.integers(-1, count - 1))
        death = draw(st.integers(max(birth, 0), count))
        blocks.append(Block(f"b{i}", Role.ACTIVATION, draw(sizes()), birth, death))
    return Trace(instants, tuple(blocks))


bindings = st.fixed_dictionaries({B: st.integers(1, 2000), S: st.integers(1, 2000)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=traces(), binding=bindings, tiny=st.sampled_from([{B: 1, S: 1}, {B: 1, S: 50}]))
def test_it_equals_the_profile(
    trace: Trace, binding: dict[sympy.Symbol, int], tiny: dict[sympy.Symbol, int]
) -> None:
    found = formula(trace)
    for at in (binding, tiny):
        there = profile(trace, at)
        assert int(found.peak.subs(at)) == there.peak
        assert int(found.resident.subs(at)) == there.resident
    for term in found.terms:
        assert int(term.expr.subs(binding)) == profile(trace, binding).bytes[term.instant]


def test_an_atom_may_be_negative() -> None:
    """Near 5 the constant is the largest: elsewhere, and where terms are sampled, another one is."""
    sizes = (sympy.Integer(1000), 1000 + sympy.floor((S - 9) / 2), 1020 - 5 * S)
    instants = tuple(Instant(f"op_{i}", "aten.op", Phase.FORWARD, x) for i, x in enumerate(sizes))
    found = formula(Trace(instants, ()))
    for size in range(1, 40):
        assert found.peak.subs(S, size) == max(x.subs(S, size) for x in sizes)


def test_layers_alike_need_few_terms() -> None:
    """Activations are dropped, layer by layer, while gradients grow: only the ends can be largest."""
    layers, activation, weight = 40, 12 * B * S + 5 * B * S**2, 7000
    names = [f"f{i}" for i in range(layers)] + [f"b{i}" for i in range(layers)]
    phases = [Phase.FORWARD] * layers + [Phase.BACKWARD] * layers
    instants = tuple(Instant(n, "aten.op", p) for n, p in zip(names, phases, strict=True))
    blocks = [
        Block(f"a{i}", Role.ACTIVATION, activation, i, 2 * layers - 1 - i) for i in range(layers)
    ]
    blocks += [
        Block(f"g{i}", Role.GRADIENT, sympy.Integer(weight), layers + i, 2 * layers)
        for i in range(layers)
    ]
    found = formula(Trace(instants, tuple(blocks)))
    assert len(found.terms) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    polynomials=st.lists(
        st.tuples(st.integers(-50, 50), st.integers(-300, 300), st.integers(-3, 3)),
        min_size=1,
        max_size=3,
    ),
    steps=st.integers(0, 20),
    limit=st.integers(-100, 5000),
)
def test_the_largest_is_that_of_a_scan(
    polynomials: list[tuple[int, int, int]], steps: int, limit: int
) -> None:
    top = 2000
    terms = [a + b * S + c * S**2 + steps * sympy.ceiling(S / 7) for a, b, c in polynomials]
    peak = sympy.Max(*terms, 3 * S - 2 * top + limit)  # does not fit beyond the scan
    if not peak.has(S):
        return
    numbers = [
        n
        for n in range(1, top + 1)
        if all(a + b * n + c * n * n + steps * -(-n // 7) <= limit for a, b, c in polynomials)
        and 3 * n <= 2 * top
    ]
    assert largest(peak, S, {}, limit) == (numbers[-1] if numbers else None)


@pytest.mark.parametrize(
    ("peak", "limit", "found"),
    [
        (8 * S + sympy.Max(1024, 256 * S), 5000, 18),
        (8 * S + sympy.Max(1024, 256 * S), 1040, 2),
        (100 * S + sympy.Mod(3 * S, 4), 1000, 9),
        (sympy.Max(1, sympy.floor(S / 2 - 1) + 1) * 64, 640, 21),
    ],
)
def test_the_largest_within_steps(peak: sympy.Expr, limit: int, found: int) -> None:
    assert largest(peak, S, {}, limit) == found
    assert peak.subs(S, found) <= limit < peak.subs(S, found + 1)


def test_what_does_not_depend_on_a_size_has_no_largest() -> None:
    with pytest.raises(ValueError, match="does not depend"):
        largest(8 * B, S, {B: 2}, 100)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=sizes())
def test_gathering_changes_nothing(size: sympy.Expr) -> None:
    assert sympy.expand(gathered(size) - size) == 0


def test_text() -> None:
    assert to_text(12 * B * S**2 + 96 * B * S + 497_759_232) == (
        "12·batch·seq·(seq + 8) + 497,759,232"
    )
    assert to_text(sympy.Max(5 * B * S + 3, 8 * B + 7)) == "3 + Max(8·batch + 4, 5·batch·seq)"
    assert r"\mathrm{batch}" in to_latex(sympy.Max(5 * B * S + 3, 8 * B + 7))


def test_larger_limits_never_give_less() -> None:
    peak = sympy.Max(1000 + 8 * S, 12 * S**2, 30 * sympy.ceiling(S / 3))
    found = [largest(peak, S, {}, limit) or 0 for limit in range(900, 40_000, 700)]
    assert all(a <= b for a, b in pairwise(found))


def test_products_of_floors_prove_nothing() -> None:
    """Where both are 0, a product of their lower bounds would be above the product."""
    n, m, k = (sympy.Symbol(name, positive=True, integer=True) for name in "nmk")
    area = sympy.floor(n / 4) * sympy.floor(m / 4)
    sizes = (
        100 * k * n * m + 9 * n + 9 * m,
        100 * k * n * m + k * (16 * area + 3 * (n - 1) + 3 * (m - 1)),
        100 * k * n * m + 9 * k,
    )
    instants = tuple(Instant(f"op_{i}", "aten.op", Phase.FORWARD, s) for i, s in enumerate(sizes))
    trace = Trace(instants, ())
    at = {n: 2, m: 2, k: 100}
    assert int(formula(trace).peak.subs(at)) == profile(trace, at).peak
