"""Sizes that are symbols while a step is traced: their example values, and their form for users.

A traced size is an `int` or a `torch.SymInt`. The *hint* of a symbolic size is its value in the example;
asking for it adds no guard, whereas comparing or converting the size does. A guard is a condition on
the symbols under which the trace holds; see `domain`.

Users see plain sympy: symbols that are positive integers under the users' names, and `floor`, `Mod` and
`Max` for torch's own functions of the same meaning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from .trace import positive


def hint(size: int | torch.SymInt) -> int:
    """The size in the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def hints(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """The sizes in the example."""
    return tuple(map(hint, sizes))


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """The size in torch's symbols."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def tensor_text(dtype: torch.dtype, shape: Sequence[int | torch.SymInt], names: "Names") -> str:
    """Type and shape in a few characters: ``f32[8, 128]``."""
    kind = str(dtype).removeprefix("torch.")
    short = kind.replace("bfloat", "bf").replace("float", "f").replace("int", "i")
    return f"{short}[{', '.join(str(names.plain(expression(n))) for n in shape)}]"


class Names:
    """Turns expressions in torch's symbols into users' ones; each distinct expression once."""

    def __init__(
        self, names: Mapping[str, str], equal: Mapping[sympy.Expr, sympy.Integer] | None = None
    ) -> None:
        """Start.

        Args:
            names: torch's symbol -> the user's name; others keep theirs.
            equal: what is known to be a number, in the users' symbols.
        """
        self._names = names
        self._equal = dict(equal or {})
        self._known: dict[sympy.Basic, Any] = {}

    def plain(self, expression: Any) -> Any:
        """The same expression for users."""
        if not isinstance(expression, sympy.Basic) or expression.is_Integer:
            return expression
        if expression not in self._known:
            symbols = {s: positive(self._names.get(str(s), str(s))) for s in _symbols(expression)}
            plain = _plain(expression.xreplace(symbols)).xreplace(self._equal)
            self._known[expression] = _expanded(plain)
        return self._known[expression]


def _symbols(expression: sympy.Basic) -> list[sympy.Symbol]:
    return sorted(expression.free_symbols, key=str)


def _expanded(expression: sympy.Basic) -> sympy.Basic:
    return sympy.expand(expression) if isinstance(expression, sympy.Expr) else expression


def _plain(expression: Any) -> Any:
    """Replace torch's functions by sympy's, from the leaves up."""
    if not expression.args:
        return expression
    args = [_plain(arg) for arg in expression.args]
    name = type(expression).__name__
    if name in ("FloorDiv", "CleanDiv"):
        return sympy.floor(args[0] / args[1])
    if name == "ModularIndexing":
        return sympy.Mod(sympy.floor(args[0] / args[1]), args[2])
    if name in ("PythonMod", "Mod"):
        return sympy.Mod(args[0], args[1])
    if name in ("CeilToInt", "CeilDiv"):
        return sympy.ceiling(args[0] if len(args) == 1 else args[0] / args[1])
    if name == "FloorToInt":
        return sympy.floor(args[0])
    if name in ("Max", "Min"):
        return getattr(sympy, name)(*args)
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        return args[0] / args[1]
    if name in ("ToFloat", "Identity"):
        return args[0]
    return expression.func(*args)
