"""Optimizers that are not in torch, as far as their memory goes.

Each allocates what the real one allocates, in the same order, and computes nothing: for `analyze`, and for
plans that count an optimizer by name. Sources:
    adam8bit, lion8bit   bitsandbytes 0.50, blockwise state: one byte for each element and state, and a
        float32 maximum for every 256 elements; tensors below 4096 elements keep float32 state. The step is
        in place.
    lion                 the reference implementation (github.com/google/automl, lion_pytorch.py): one
        momentum; its step works on one parameter at a time, on a copy of the momentum and what is added
        to it.

Not modelled: paged state, and the tables of quantiles that bitsandbytes keeps (2 kB each).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_BLOCK = 256
_SMALLEST = 4096
"""Elements; smaller tensors are not quantised."""


class _Model(Optimizer):
    """Makes state for every parameter at its first step, and takes what an update takes."""

    states: tuple[str, ...] = ()
    blockwise = False
    """State in one byte for each element."""

    def __init__(self, params: Iterable[Any]) -> None:
        """Over `params`."""
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, parameter by parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._make(parameter)
                self._update(parameter)

    def _make(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        quantised = self.blockwise and parameter.numel() >= _SMALLEST
        for name in self.states:
            dtype = torch.uint8 if quantised else torch.float32 if self.blockwise else None
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            if quantised:
                blocks = -(-parameter.numel() // _BLOCK)
                state[f"{name}_absmax"] = torch.zeros(
                    blocks, dtype=torch.float32, device=parameter.device
                )

    def _update(self, parameter: torch.Tensor) -> None:
        """Take temporaries; none if the update is in place."""


class Adam8bit(_Model):
    """Adam and AdamW of bitsandbytes with 8-bit state."""

    states = ("state1", "state2")
    blockwise = True


class Lion8bit(_Model):
    """Lion of bitsandbytes with 8-bit state."""

    states = ("state1",)
    blockwise = True


class Lion(_Model):
    """Lion, one parameter at a time."""

    states = ("exp_avg",)

    def _update(self, parameter: torch.Tensor) -> None:
        update = self.state[parameter]["exp_avg"].clone().add(parameter.grad)
        parameter.add_(update.sign_(), alpha=0.0)


MODELS: dict[str, type[Optimizer]] = {
    "adam8bit": Adam8bit,
    "adamw8bit": Adam8bit,
    "lion": Lion,
    "lion8bit": Lion8bit,
}
"""By the names under which users ask for them."""
