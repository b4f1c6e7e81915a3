"""Globals that a forward reads: numbers, strings, functions and tensors of the user's own modules.

Found in the code of the forwards of all submodules, of methods that they call on themselves, and of
functions that they call by a global name, and so on. Installed libraries are passed over: their globals are
no settings.

Not found: globals of other modules (``config.beta``), variables of enclosing functions, environment
variables, attributes of classes.
"""

import dis
import inspect
import sysconfig
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))
_VALUES = (bool, int, float, complex, str, bytes, tuple, type(None), FunctionType, torch.Tensor)


def globals_read(model: nn.Module) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Tables of globals that the forwards of a model read, each with the values that are watched in it."""
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    seen: set[CodeType] = set()
    waiting = [
        (type(module), function)
        for module in model.modules()
        for function in (type(module).forward, vars(module).get("forward"))
    ]
    while waiting:
        cls, function = waiting.pop()
        function = getattr(function, "__wrapped__", function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if function.__code__.co_filename.startswith(_INSTALLED):
            continue
        table = function.__globals__
        for kind, name in _names(function.__code__):
            if kind == "global" and isinstance(value := table.get(name, dis), _VALUES):
                found.setdefault(id(table), (table, {}))[1][name] = value
                waiting.append((cls, value))
            elif kind == "attribute":
                waiting.append((cls, inspect.getattr_static(cls, name, None)))
    return found


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """Names that code loads, functions inside it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield "global", str(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "attribute", str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
