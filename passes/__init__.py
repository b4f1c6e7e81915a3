"""Passes, one a file, each a function: analyses of the graph, and its rewriting to a plan.

Names whose modules need torch are imported when they are first used, so that liveness, formulation
and the solvers run without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .formulate import Index, cut_stages, formulate, resident_bytes
from .liveness import LiveRanges, holders, live_ranges, planned_trace
from .memory import MemoryProfile, alive_at, at_binding, profile
from .patterns import Demands, Patterns, demands
from .plan import Ledger, Plan, Tensor
from .protocol import StepProtocol
from .whole_step import whole_step

if TYPE_CHECKING:
    from .cost import Cost, costs, timed_costs
    from .devices import Device, device
    from .eager import eager_trace, optimizer_trace
    from .emit import (
        Emitted,
        emit_schedule,
        emitted_at,
        overwriting_ops,
        repeated_tensors,
        saved_tensors,
    )
    from .prepare import Prepared, planned_for_cuda, prepare_step, resized, scratch_for
    from .randomness import state_bytes
    from .reorder import find_order, must_precede, reorder_step
    from .rewrite import Rewritten, rewrite_joint
    from .scratch import Call, Scratch, measure_scratch
    from .split import Parts, Stage, joined, split_joint

_MODULES = {
    "cost": ("Cost", "costs", "timed_costs"),
    "devices": ("Device", "device"),
    "eager": ("eager_trace", "optimizer_trace"),
    "emit": (
        "Emitted",
        "emit_schedule",
        "emitted_at",
        "overwriting_ops",
        "repeated_tensors",
        "saved_tensors",
    ),
    "prepare": ("Prepared", "planned_for_cuda", "prepare_step", "resized", "scratch_for"),
    "randomness": ("state_bytes",),
    "reorder": ("find_order", "must_precede", "reorder_step"),
    "rewrite": ("Rewritten", "rewrite_joint"),
    "scratch": ("Call", "Scratch", "measure_scratch"),
    "split": ("Parts", "Stage", "joined", "split_joint"),
}
_NEEDS_TORCH = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Call",
    "Cost",
    "Demands",
    "Device",
    "Emitted",
    "Index",
    "Ledger",
    "LiveRanges",
    "MemoryProfile",
    "Parts",
    "Patterns",
    "Plan",
    "Prepared",
    "Rewritten",
    "Scratch",
    "Stage",
    "StepProtocol",
    "Tensor",
    "alive_at",
    "at_binding",
    "costs",
    "cut_stages",
    "demands",
    "device",
    "eager_trace",
    "emit_schedule",
    "emitted_at",
    "find_order",
    "formulate",
    "holders",
    "joined",
    "live_ranges",
    "measure_scratch",
    "must_precede",
    "optimizer_trace",
    "overwriting_ops",
    "planned_for_cuda",
    "planned_trace",
    "prepare_step",
    "profile",
    "reorder_step",
    "repeated_tensors",
    "resident_bytes",
    "resized",
    "rewrite_joint",
    "saved_tensors",
    "scratch_for",
    "split_joint",
    "state_bytes",
    "timed_costs",
    "whole_step",
]


def __getattr__(name: str) -> object:
    if name in _NEEDS_TORCH:
        return getattr(import_module(f".{_NEEDS_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
