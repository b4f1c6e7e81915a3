"""A program's graphs as plain data for JSON, and graphs of it again.

A row for each node: op, name, target, arguments. Values that JSON has are themselves; all others are an
object with one key, which says what it is. Constants are kept with `torch.save`. What a graph has beside
its code (fake values, source lines) is not kept.

A file may be anybody's: only ops and the few ops that programs call are called, and only names become
code.

Not handled (`TypeError`): nodes that call modules or methods, attributes that are no tensors, symbolic sizes.
"""

import base64
import io
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from remat.ir._torch import BoxedCodeGen

from .randomness import generator_state, repeat_random

Data = dict[str, Any]
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "generator_state": generator_state,
    "repeat_random": repeat_random,
}
"""What programs call beside ops."""


def graph_data(module: fx.GraphModule) -> Data:
    """A graph module as plain data.

    Raises:
        TypeError: it holds what data cannot.
    """
    constants: dict[str, str] = {}
    rows = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            constants[str(node.target)] = _saved(getattr(module, str(node.target)))
        elif node.op not in ("placeholder", "call_function", "output"):
            raise TypeError(f"{node.op} {node.name}")
        target = _encoded(node.target)
        rows.append([node.op, node.name, target, _encoded(node.args), _encoded(node.kwargs)])
    return {"rows": rows, "constants": constants}


def graph_of(data: Data) -> fx.GraphModule:
    """The graph module of data, with boxed inputs.

    Raises:
        Exception: the data are no graph's.
    """
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    nodes: dict[str, fx.Node] = {}
    ops: dict[str, Any] = {}
    for op, name, target, args, kwargs in data["rows"]:
        if not name.isidentifier() or (isinstance(target, str) and not target.isidentifier()):
            raise ValueError(f"{name} {target}")
        if op == "call_function" and next(iter(target)) not in ("op", "function"):
            raise ValueError(f"{target} is called")
        nodes[name] = graph.create_node(
            op,
            _decoded(target, nodes, ops),
            _decoded(args, nodes, ops),
            _decoded(kwargs, nodes, ops),
            name,
        )
    constants = {name: _loaded(text) for name, text in data["constants"].items()}
    return fx.GraphModule(constants, graph)


def _encoded(value: object) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _encoded(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encoded(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, OpOverload):
        return {"op": str(value)}
    for name, function in _FUNCTIONS.items():
        if value is function:
            return {"function": name}
    raise TypeError(f"{type(value).__name__} {value}")


def _decoded(value: Any, nodes: Mapping[str, fx.Node], ops: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, nodes, ops) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return nodes[held]
    if kind == "dict":
        return {key: _decoded(item, nodes, ops) for key, item in held.items()}
    if kind in ("tuple", "slice"):
        items = [_decoded(item, nodes, ops) for item in held]
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "complex":
        return complex(*held)
    if kind == "device":
        return torch.device(held)
    if kind == "torch":
        named = getattr(torch, held)
        if not isinstance(named, torch.dtype | torch.layout | torch.memory_format):
            raise ValueError(held)
        return named
    return _op(held, ops) if kind == "op" else _FUNCTIONS[held]


def _op(name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        namespace, packet, overload = name.rsplit(".", 2)
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if not isinstance(op, OpOverload):
            raise ValueError(name)
        known[name] = op
    return known[name]


def _saved(value: object) -> str:
    if type(value) is not torch.Tensor:
        raise TypeError(type(value).__name__)
    buffer = io.BytesIO()
    torch.save(value.clone(), buffer)  # of a view, all that it is a view of would be written
    return base64.b64encode(buffer.getvalue()).decode()


def _loaded(text: str) -> torch.Tensor:
    value: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return value
