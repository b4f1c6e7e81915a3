"""Passes, one a file, each a function: analyses of the graph, and its rewriting to a plan.

Names whose modules need torch are imported when they are first used, so that liveness, formulation
and the solvers run without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .memory import MemoryProfile, alive_at, at_binding, profile

if TYPE_CHECKING:
    from .cost import Cost, costs, timed_costs
    from .devices import Device, device
    from .eager import eager_trace, optimizer_trace
    from .scratch import Call, Scratch, measure_scratch

_NEEDS_TORCH = {
    "Call": "scratch",
    "Cost": "cost",
    "Device": "devices",
    "Scratch": "scratch",
    "costs": "cost",
    "device": "devices",
    "eager_trace": "eager",
    "measure_scratch": "scratch",
    "optimizer_trace": "eager",
    "timed_costs": "cost",
}

__all__ = [
    "Call",
    "Cost",
    "Device",
    "MemoryProfile",
    "Scratch",
    "alive_at",
    "at_binding",
    "costs",
    "device",
    "eager_trace",
    "measure_scratch",
    "optimizer_trace",
    "profile",
    "timed_costs",
]


def __getattr__(name: str) -> object:
    if name in _NEEDS_TORCH:
        return getattr(import_module(f".{_NEEDS_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
