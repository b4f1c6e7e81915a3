"""Sizes in a symbolic joint graph: computed first of all, from the arguments alone.

Definitions.
    (1) A *number* is a node that yields no tensor but a size or an expression of sizes.
    (2) A *root* of a symbol is the first argument and dimension whose size is that symbol.
A trace takes a size from whichever tensor is at hand, which keeps that tensor alive, and computes it
where it is needed, in forward or backward. Here every number is computed anew before the first op: the
symbols from their roots, all else from these, each expression once. So numbers hold no memory, and those
that backward needs are handed over as they are.

Not handled: sizes that depend on data (`ir.capture` refuses them); functions of sizes beyond sums,
products, powers, floor division, remainders, minimum and maximum.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from .errors import UnsupportedGraphError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MANY: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
_TWO: dict[str, Callable[..., Any]] = {
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
}


def is_number(node: fx.Node) -> bool:
    """The node yields a size or an expression of sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)


def hoist_sizes(joint: fx.GraphModule) -> None:
    """Compute the numbers of `joint` before its first op, in place."""
    nodes = list(joint.graph.nodes)
    first = next(node for node in nodes if node.op == "call_function" and not is_number(node))
    sizes = _Sizes(joint.graph, first, _roots(nodes))
    old: list[fx.Node] = []
    for node in nodes:
        if isinstance(node.meta.get("val"), torch.SymInt) and node.op == "call_function":
            sizes.instead[node] = sizes.node(node.meta["val"].node.expr)
            old.append(node)
        elif node.op in ("call_function", "output"):
            node.args = map_aggregate(node.args, sizes.leaf)
            node.kwargs = map_aggregate(node.kwargs, sizes.leaf)
            if is_number(node):
                first.prepend(node)
    for node in reversed(old):
        joint.graph.erase_node(node)


def _roots(nodes: list[fx.Node]) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    found: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    for node in nodes:
        tangent = type(node.meta.get("desc")).__name__ == "TangentAOTInput"
        value = node.meta.get("val")
        if node.op != "placeholder" or tangent or not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (node, dim))
    return found


@dataclass(slots=True)
class _Sizes:
    """Nodes that compute sizes, one for each expression."""

    graph: fx.Graph
    before: fx.Node
    roots: dict[sympy.Symbol, tuple[fx.Node, int]]
    known: dict[sympy.Expr, Any] = field(default_factory=dict)
    instead: dict[fx.Node, Any] = field(default_factory=dict)
    """The node that is used in the place of one that was traced."""

    def leaf(self, value: Any) -> Any:
        """An argument of a node, with one of these nodes in the place of a size."""
        if isinstance(value, torch.SymInt):
            return self.node(value.node.expr)
        return self.instead.get(value, value) if isinstance(value, fx.Node) else value

    def node(self, size: sympy.Expr) -> Any:
        """The node that computes a size; the number itself if it is one."""
        if size.is_Integer:
            return int(size)
        if size not in self.known:
            self.known[size] = self._made(size)
        return self.known[size]

    def _made(self, size: sympy.Expr) -> fx.Node:
        kind = type(size).__name__
        if size in self.roots:
            return self._call(torch.ops.aten.sym_size.int, *self.roots[size])
        if kind in _MANY:
            made: fx.Node = reduce(
                lambda a, b: self._call(_MANY[kind], a, b), map(self.node, size.args)
            )
            return made
        if kind in _TWO:
            return self._call(_TWO[kind], *map(self.node, size.args))
        raise UnsupportedGraphError(
            f"the model computes the size {size} from its arguments', which a symbolic graph cannot "
            "hold. Leave one of these sizes out of dynamic."
        )

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            made = self.graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        made.meta = {"val": target(*values), "partitioner_tag": "is_forward"}
        return made
