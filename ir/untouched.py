"""Python state around a trace: found out, compared and put back.

A trace runs the user's forward on fake tensors. What the forward does to Python objects happens then,
and not when the planned graph runs: an attribute that it sets would hold a fake tensor and never
change again, a number that it draws from Python's or NumPy's generator would be drawn once for all.

Seen are attributes of the module and its submodules, set anew or, for containers, changed in their elements,
also in those of containers inside; the two generators; and containers and attributes of objects in the
arguments. Not seen: changes inside other objects.
"""

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .containers import PLAIN, Contents, contents, elements, same
from .errors import UnsupportedGraphError


@dataclass(frozen=True, slots=True)
class PythonState:
    """Python state at one time."""

    modules: tuple[tuple[str, nn.Module, Mapping[str, tuple[object, Contents]]], ...]
    """Name, module, and of each attribute its value and the contents of containers."""
    generators: tuple[Any, Any]
    """State of Python's and of NumPy's generator; None if NumPy is not in use."""


def python_state(module: nn.Module) -> PythonState:
    """The state now."""
    return PythonState(
        tuple(
            (name, child, {k: (v, contents(v)) for k, v in vars(child).items()})
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
        for key, (value, held) in attributes.items():
            now = vars(module).get(key)
            if same(now, value) and not held.changed():
                continue
            changed += [] if key in computed else [f"attribute {name}.{key}".replace(" .", " ")]
            vars(module)[key] = value
            held.put_back()
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
    held: list[tuple[str, Contents]] = []
    _hold(arguments, held, set())
    changed = ""
    try:
        yield
    finally:
        for owner, before in held:
            if before.changed():
                changed = changed or owner
                before.put_back()
    if changed:
        raise UnsupportedGraphError(
            f"the forward changes an argument, a {changed} (a cache that it fills, perhaps), which a planned "
            "step would not do. Return what the training loop reads, or train without that argument."
        )


def _hold(value: Any, held: list[tuple[str, Contents]], seen: set[int]) -> None:
    """Copy the contents of all containers and objects that a value refers to; not of modules."""
    fixed = (*PLAIN, torch.Tensor, nn.Module, type, Enum, ModuleType)
    if id(value) in seen or isinstance(value, fixed) or callable(value):
        return
    seen.add(id(value))
    inside: list[object] = list(value) if isinstance(value, tuple | list | set) else []
    for each in (value, getattr(value, "__dict__", None)):
        if isinstance(each, list | dict | set):
            held.append((type(value).__name__, Contents(((each, elements(each)),))))
        if isinstance(each, dict):
            inside += each.values()
    for item in inside:
        _hold(item, held, seen)
