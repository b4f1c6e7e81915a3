"""A program's graphs as plain data for JSON, and graphs of it again.

A row for each node: op, name, target, arguments. Values that JSON has are themselves; all others are an
object with one key, which says what it is. Constants are kept with `torch.save`. What a graph has beside
its code (fake values, source lines) is not kept.

Not handled (`TypeError`): nodes that call modules or methods, attributes that are no tensors, symbolic sizes.
"""

import base64
import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from remat.ir._torch import BoxedCodeGen

Data = dict[str, Any]


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
    functions: dict[str, Any] = {}
    for op, name, target, args, kwargs in data["rows"]:
        nodes[name] = graph.create_node(
            op,
            _decoded(target, nodes, functions),
            _decoded(args, nodes, functions),
            _decoded(kwargs, nodes, functions),
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
    if callable(value) and _function(name := _name(value), {}) is value:
        return {"function": name}
    raise TypeError(f"{type(value).__name__} {value}")


def _decoded(value: Any, nodes: Mapping[str, fx.Node], functions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, nodes, functions) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return nodes[held]
    if kind == "dict":
        return {key: _decoded(item, nodes, functions) for key, item in held.items()}
    if kind in ("tuple", "slice"):
        items = [_decoded(item, nodes, functions) for item in held]
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "complex":
        return complex(*held)
    if kind == "device":
        return torch.device(held)
    if kind == "torch":
        return getattr(torch, held)
    return _op(held, functions) if kind == "op" else _function(held, functions)


def _op(name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        namespace, packet, overload = name.rsplit(".", 2)
        known[name] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return known[name]


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', '')}"


def _function(name: str, known: dict[str, Any]) -> Any:
    """A function by module and name; other modules than these are not imported for a file's sake."""
    if name not in known:
        module, _, qualified = name.partition(":")
        ours = module.split(".")[0] in ("remat", "torch", "_operator", "math")
        known[name] = getattr(importlib.import_module(module), qualified, None) if ours else None
    return known[name]


def _saved(value: object) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(type(value).__name__)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _loaded(text: str) -> torch.Tensor:
    value: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return value
