"""Python state around a trace: found out, compared and put back.

A trace runs the user's forward on fake tensors. What the forward does to Python objects happens then,
and not when the planned graph runs: an attribute that it sets would hold a fake tensor and never
change again, a number that it draws from Python's or NumPy's generator would be drawn once for all.

Seen are attributes of the module and its submodules, set anew or, for containers, changed in their elements,
also in those of containers inside; and the two generators. Not seen: changes inside other objects.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .containers import Contents, contents, same


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
