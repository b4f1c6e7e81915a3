"""Python state around a trace: found out, compared and put back.

A trace runs the user's forward on fake tensors. What the forward does to Python objects happens then,
and not when the planned graph runs: an attribute that it sets would hold a fake tensor and never
change again, a number that it draws from Python's or NumPy's generator would be drawn once for all.

Seen are attributes of the module and its submodules, set anew or changed in their length or elements
(list, dict, set), and the two generators; and lists, dicts, sets and attributes of objects in the arguments.
Not seen: changes inside other objects.
"""

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedGraphError

_PLAIN = (str, bytes, int, float, complex, bool)


@dataclass(frozen=True, slots=True)
class PythonState:
    """Python state at one time."""

    modules: tuple[tuple[str, nn.Module, Mapping[str, tuple[object, object]]], ...]
    """Name, module, and of each attribute its value and, of a container, a shallow copy."""
    generators: tuple[Any, Any]
    """State of Python's and of NumPy's generator; None if NumPy is not in use."""


def python_state(module: nn.Module) -> PythonState:
    """The state now."""
    return PythonState(
        tuple(
            (name, child, {k: (v, _contents(v)) for k, v in vars(child).items()})
            for name, child in module.named_modules()
        ),
        _generators(),
    )


def put_back(state: PythonState) -> list[str]:
    """Restore a state; returns what had changed, for people.

    Attributes that torch's own pre-forward hooks compute anew for every forward (the weight under
    `spectral_norm`, `weight_norm`, pruning) are restored and not reported.
    """
    changed: list[str] = []
    for name, module, attributes in state.modules:
        hooks = module._forward_pre_hooks.values()
        computed = {getattr(hook, key, "") for hook in hooks for key in ("name", "_tensor_name")}
        for key in [key for key in vars(module) if key not in attributes]:
            changed += [] if key in computed else [f"attribute {name}.{key}".replace(" .", " ")]
            del vars(module)[key]
        for key, (value, contents) in attributes.items():
            now = vars(module).get(key)
            if _same(now, value) and _same_contents(value, contents):
                continue
            changed += [] if key in computed else [f"attribute {name}.{key}".replace(" .", " ")]
            vars(module)[key] = value
            _restore_contents(value, contents)
    now_python, now_numpy = _generators()
    python, numpy = state.generators
    if now_python != python:
        changed.append("Python's random generator")
        random.setstate(python)
    if repr(now_numpy) != repr(numpy):
        changed.append("NumPy's random generator")
        sys.modules["numpy"].random.set_state(numpy)
    return changed


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


@contextlib.contextmanager
def arguments_kept(arguments: object) -> Iterator[None]:
    """Put back what is done inside to Python objects in the arguments of a forward.

    Raises:
        UnsupportedGraphError: something was done; a planned step works on copies of them, or not at all.
    """
    held: list[tuple[object, object, object]] = []
    _hold(arguments, held, set())
    changed = ""
    try:
        yield
    finally:
        for owner, contents, before in held:
            if not _same_contents(contents, before):
                changed = changed or type(owner).__name__
                _restore_contents(contents, before)
    if changed:
        raise UnsupportedGraphError(
            f"the forward changes an argument, a {changed} (a cache that it fills, perhaps), which a planned "
            "step would not do. Return what the training loop reads, or train without that argument."
        )


def _hold(value: Any, held: list[tuple[object, object, object]], seen: set[int]) -> None:
    """Copy the contents of all containers and objects that a value refers to; not of modules."""
    fixed = (*_PLAIN, torch.Tensor, nn.Module, type, Enum, ModuleType)
    if id(value) in seen or isinstance(value, fixed) or callable(value):
        return
    seen.add(id(value))
    inside: list[object] = list(value) if isinstance(value, tuple | list | set) else []
    for contents in (value, getattr(value, "__dict__", None)):
        if isinstance(contents, list | dict | set):
            held.append((value, contents, copy.copy(contents)))
        if isinstance(contents, dict):
            inside += contents.values()
    for item in inside:
        _hold(item, held, seen)


def _contents(value: object) -> object:
    return copy.copy(value) if isinstance(value, list | dict | set) else None


def _same(now: object, before: object) -> bool:
    equal = type(now) is type(before) and isinstance(now, _PLAIN) and now == before
    return now is before or equal


def _same_contents(value: object, before: object) -> bool:
    if isinstance(value, dict) and isinstance(before, dict):
        return list(value) == list(before) and all(map(_same, value.values(), before.values()))
    if isinstance(value, list | set) and isinstance(before, list | set):
        return len(value) == len(before) and all(map(_same, value, before))
    return True


def _restore_contents(value: Any, before: Any) -> None:
    if before is None:
        return
    value.clear()
    value.extend(before) if isinstance(value, list) else value.update(before)
