"""Measured peak of one step of somebody else's loop, on CPU.

Definitions.
    (1) A step runs from the end of one optimizer step to the end of the next.
    (2) Measured peak = bytes of the model's parameters and buffers, of the optimizer's state, and of
        gradients that are kept from step to step, plus the largest number of bytes that were allocated
        since the measurement began and not released. It is taken over the second step after that, so
        that what one step leaves to the next has been allocated since.

The allocator's events are those of `torch.profiler`, which is on for two steps; planning uses the profiler
too, so a measurement that it would disturb is given up and begun again.

Not measured: what the script has allocated before (data sets, other models), and steps in which the
script profiles itself.
"""

import gc
import time
import weakref
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from remat.ir._torch import profiler_enabled

from .dropin import Remat
from .optimizers import watch_optimizers
from .script_memory import state_tensors, unique_bytes


class StepPeak:
    """Measures one step, as soon as a whole one has passed without planning."""

    def __init__(self, model: nn.Module, remat: Remat) -> None:
        """Wait for the optimizer to step.

        Args:
            model: the drop-in.
            remat: its plans.
        """
        self.bytes: int | None = None
        self._model, self._remat = weakref.ref(model), weakref.ref(remat)
        self._mine = {id(p) for p in model.parameters()}
        self._plans = -1
        self._optimizer: weakref.ref[Optimizer] | None = None
        """The one whose steps are counted, of several that share the model."""
        self._record: Any = None
        self._base = 0
        self._gradients: list[weakref.ref[torch.Tensor]] = []
        self._begun_ns = 0
        """When the step that is measured began; 0 before it."""
        watch_optimizers(self)

    def stop(self) -> None:
        """Give up a measurement that is going on."""
        if self._record is not None:
            self._record.__exit__(None, None, None)
        self._record, self._begun_ns, self._plans = None, 0, -1

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """A step has ended if the optimizer holds parameters of the model."""
        model, remat = self._model(), self._remat()
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self.bytes is not None or model is None or remat is None or self._mine.isdisjoint(held):
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        if self._record is None:
            if self._plans == remat.stats.plans:
                self._begin(model)
            self._plans = remat.stats.plans
        elif not self._begun_ns:
            self._begun_ns = time.time_ns()
            kept = [gradient for ref in self._gradients if (gradient := ref()) is not None]
            self._base += sum(gradient.nbytes for gradient in kept)
        else:
            self._end()

    def _begin(self, model: nn.Module) -> None:
        if profiler_enabled():
            return
        self._base = _persistent(model)
        self._gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        self._record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._record.__enter__()

    def _end(self) -> None:
        record, begun, ended = self._record, self._begun_ns, time.time_ns()
        self.stop()
        events = record.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        levels = accumulate(size for _, size in changes)
        within = [
            level for (at, _), level in zip(changes, levels, strict=True) if begun <= at <= ended
        ]
        self.bytes = self._base + max(within, default=0)


def _persistent(model: nn.Module) -> int:
    """Bytes that stay from step to step: the model, and the state of all optimizers of its parameters."""
    parameters = list(model.parameters())
    mine = {id(p) for p in parameters}
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    state = [tensor for o in optimizers for tensor in state_tensors(o, mine)]
    return unique_bytes([*parameters, *model.buffers(), *state], parameters[0].device)
