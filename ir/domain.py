"""The domain of a symbolic graph: the sizes for which it holds.

Definitions.
    (1) A *size name* is the user's name for a size that was to be a symbol.
    (2) It is *fixed* if the trace needs it as a number: the model compares it with one, an op was
        traced for one, or it was 0 or 1 in the example, for which torch takes ops apart.
    (3) The domain is every binding of the names that keeps fixed ones at their number and fulfils all
        conditions that the trace has noted: comparisons of sizes, and least and largest sizes.

Read it after the last fake value of the graph was computed: computing one may note further conditions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from ._torch import FakeTensor, ShapeEnv
from .symbols import Names
from .trace import positive

Sizes = Mapping[str, int]
"""Size name -> number."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A size that was to be a symbol, and that the step needs as a number."""

    name: str
    """The user's name for it."""
    value: int
    where: str
    """The code that asked for the number: ``file.py:12 in forward``; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The sizes for which a graph holds."""

    example: Sizes
    """Every size name, with its number in the example."""
    fixed: Sizes
    """Those that are no symbols in the graph."""
    conditions: tuple[sympy.Basic, ...]
    """On the symbols, in the user's names; all hold in the example."""

    @property
    def symbols(self) -> dict[sympy.Symbol, int]:
        """The example, for the names that are symbols."""
        return bound({n: size for n, size in self.example.items() if n not in self.fixed})

    @property
    def numbers(self) -> dict[sympy.Expr, sympy.Integer]:
        """Expressions that are the same number at all sizes of the domain, and names that are numbers.

        A name may be needed as a number only after ops have used it as a symbol.
        """
        equal = {
            each.lhs: each.rhs
            for each in self.conditions
            if isinstance(each, sympy.Eq) and each.rhs.is_Integer and not each.lhs.is_Symbol
        }
        return equal | {positive(n): sympy.Integer(size) for n, size in self.fixed.items()}

    def why_not(self, sizes: Sizes) -> str:
        """Why sizes are outside; empty if they are inside."""
        for name, number in self.fixed.items():
            if sizes[name] != number:
                return f"the graph holds for {name} = {number} only"
        binding = bound(sizes)
        for condition in self.conditions:
            if condition.subs(binding) != sympy.true:
                return f"the graph holds for {condition} only"
        return ""

    def text(self) -> tuple[str, ...]:
        """The conditions, for people."""
        fixed = (f"{name} = {number}" for name, number in self.fixed.items())
        return (*fixed, *map(str, self.conditions))


def bound(sizes: Sizes) -> dict[sympy.Symbol, int]:
    """Numbers of the symbols that users see."""
    return {positive(name): number for name, number in sizes.items()}


def find_domain(joint: fx.GraphModule, example: Sizes, symbols: Mapping[str, str]) -> Domain:
    """The domain of a symbolic graph.

    Args:
        joint: the graph.
        example: every size name, with its number in the example.
        symbols: of `capture`: symbol in the graph -> size name.
    """
    return noted_domain(_environment(joint), example, symbols)


def noted_domain(env: ShapeEnv | None, example: Sizes, symbols: Mapping[str, str]) -> Domain:
    """The domain of what was traced under `env`; other arguments as of `find_domain`."""
    names = Names(symbols)
    fixed = {name: size for name, size in example.items() if name not in symbols.values()}
    if env is None:
        return Domain(dict(example), fixed, ())
    conditions: list[sympy.Basic] = []
    for symbol, value in env.replacements.items():
        name = symbols.get(str(symbol))
        value = env.replace(value)
        if name and value.is_Integer:
            fixed[name] = int(value)
        elif name:
            conditions.append(sympy.Eq(positive(name), names.plain(value)))
    for symbol, limits in env.var_to_range.items():
        name = symbols.get(str(symbol))
        if name and name not in fixed:
            conditions.append(positive(name) >= int(limits.lower))
    conditions += [names.plain(env.replace(guard.expr)) for guard in env.guards]
    kept = [each for each in dict.fromkeys(conditions) if each != sympy.true]
    return Domain(dict(example), fixed, tuple(kept))


def fixed_sizes(env: ShapeEnv, domain: Domain, symbols: Mapping[str, str]) -> tuple[Fixed, ...]:
    """The sizes above 1 that a trace needs as numbers, with where; arguments as of `noted_domain`."""
    where = {
        symbols.get(str(guard.expr.lhs)): str(guard.sloc.maybe_user_loc or guard.sloc).strip("()")
        for guard in env.guards
        if isinstance(guard.expr, sympy.Eq)
    }
    return tuple(
        Fixed(name, size, where.get(name, "")) for name, size in domain.fixed.items() if size > 1
    )


def torch_binding(
    joint: fx.GraphModule, sizes: Sizes, symbols: Mapping[str, str]
) -> dict[sympy.Symbol, int]:
    """Numbers of the symbols in the graph's own fakes; arguments as of `find_domain`."""
    env = _environment(joint)
    own = env.backed_var_to_val if env and symbols else {}
    return {s: sizes[symbols[str(s)]] for s in own if str(s) in symbols}


def _environment(joint: fx.GraphModule) -> ShapeEnv | None:
    """Where the trace has noted its conditions; None if no size is a symbol."""
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            found: ShapeEnv | None = value.fake_mode.shape_env
            return found
    return None
