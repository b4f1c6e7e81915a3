"""Python state around a trace: found out, compared and put back.

A trace runs the user's forward on fake tensors. What the forward does to Python objects happens then,
and not when the planned graph runs: an attribute that it sets would hold a fake tensor and never
change again, a number that it draws from Python's or NumPy's generator would be drawn once for all.

Seen are attributes of the module and its submodules, set anew or changed in their length or elements
(list, dict, set), and the two generators. Not seen: changes inside other objects.
"""

import copy
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
