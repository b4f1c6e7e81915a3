"""Which optimizer steps: the one that was planned for, another one, or one whose model was never called."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from .optimizers import traits

if TYPE_CHECKING:
    from .dropin import Remat

WARM_UP = 3
"""Optimizer steps without a training call, from which on one is missed."""


class Stepping:
    """The optimizers that step a drop-in's parameters."""

    def __init__(self) -> None:
        """Start before the first step."""
        self.assumed: object = None
        """Traits of the one that was planned for; None if none was."""
        self.other: Optimizer | None = None
        """One that steps instead, until there is a plan for it."""
        self.captured = False
        """A compiler has captured the model's forward, so no training call need come."""
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._without = 0

    def notice(self, optimizer: Optimizer, trained: Iterable[torch.Tensor]) -> None:
        """Remember an optimizer that has stepped, if it is another than was planned for.

        Args:
            optimizer: that has stepped.
            trained: parameters that the plan trains.
        """
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        mine = {id(p) for p in trained}
        if traits(optimizer) != self.assumed and any(
            id(p) in mine for group in optimizer.param_groups for p in group["params"]
        ):
            self.other = optimizer

    def stepped(self, remat: "Remat", optimizer: Optimizer) -> None:
        """An optimizer in the process has stepped."""
        if optimizer in self._seen:
            return
        called = remat.stats.planned or remat.stats.fallbacks or self.captured
        if remat.enabled and not called:
            self._without += 1
            if self._without >= WARM_UP:
                _check_called(remat, optimizer)
        entry = remat.entry
        if entry is None or self.assumed is None or remat.options.optimizer != "auto":
            return
        self.notice(optimizer, entry.guard.trained())


def _check_called(remat: "Remat", optimizer: Optimizer) -> None:
    """Warn if the model is trained without a call of the drop-in."""
    model = remat.owner()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if model is not None and any(id(p) in held for p in model.parameters()):
        remat.warn(
            "never called",
            f"remat: a {type(optimizer).__name__} has updated parameters of the "
            f"{type(model).__name__} that is to be planned, but no training call has come to its "
            "forward, so there is no memory cap. Train through the object that optimize_checkpoints "
            "returned: call it, not its parts, nor the model that it was made of.",
            stacklevel=7,
        )
