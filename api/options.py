"""The options of `optimize_checkpoints`, checked once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.passes import StepProtocol, device
from remat.solvers import Limits

from .budget import budget_bytes


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    budget: float | str
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: Optimizer | str | None
    protocol: StepProtocol
    cost_model: str
    limits: Limits

    def budget_bytes(self, model: nn.Module) -> int:
        """The budget in bytes; parts of a device refer to the one the model is on."""
        return budget_bytes(self.budget, device_of(model))

    def device_for_cost(self, model: nn.Module) -> str:
        """Name of the device whose roofline predicts times, or "timed"."""
        if self.cost_model != "roofline":
            return self.cost_model
        where = device_of(model)
        return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def check(options: Options, model: nn.Module) -> None:
    """Raise for what cannot be meant, before anything is done.

    Raises:
        ValueError: bad budget, unknown device, limits below zero.
        TypeError: not a module, not a budget.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    options.budget_bytes(model)
    if options.cost_model not in ("roofline", "timed"):
        device(options.cost_model)
    if options.limits.time_s <= 0 or options.limits.gap < 0:
        raise ValueError("time_limit_s must be above zero and gap must not be below it")


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter; the CPU for a model without data or parameters."""
    for parameter in model.parameters():
        return torch.device("cpu") if parameter.is_meta else parameter.device
    return torch.device("cpu")
