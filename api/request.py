"""What is asked for, and the steps that it is about: captured, eager, and what is beside them.

A step is captured with symbolic sizes if the user names some, and so is the eager step where it is what
runs. Where that is impossible, the sizes are numbers, and the plan's domain says so.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn

from remat.ir import Block, Role, Trace, UnsupportedGraphError
from remat.ir.fake import Dynamic, sizes_of
from remat.ir.functional import argument_names
from remat.ir.structure import take_tensors
from remat.passes import (
    Patterns,
    Prepared,
    StepProtocol,
    eager_trace,
    optimizer_trace,
    planned_for_cuda,
    prepare_step,
    scratch_for,
    whole_step,
)
from remat.passes.eager import EagerStep, eager_step
from remat.passes.loop import Loop
from remat.solvers import Limits

from .optimizers import Assumed

BESIDE = "other"
"""The block of what is on the device beside the model: `StepProtocol.other_bytes`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    budget: int
    """Bytes."""
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: Assumed
    protocol: StepProtocol
    cost_model: str
    limits: Limits
    patterns: Patterns
    dynamic: Dynamic | None = None
    """Which sizes are symbols."""
    cache_dir: Path | None = None
    """Folder in which plans are kept for later processes; None: nowhere."""

    @property
    def sizes(self) -> dict[str, int]:
        """Number of every size that is to be a symbol."""
        return self.sizes_in(take_tensors((self.args, dict(self.kwargs)))[0])

    def sizes_in(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Number of every named size in the tensors of a call that is like this one.

        Raises:
            ValueError: a name has two numbers.
        """
        if not self.dynamic:
            return {}
        mine, pattern = take_tensors((self.args, dict(self.kwargs)))
        names = argument_names(self.forward, pattern, len(mine))
        found: dict[str, int] = sizes_of(tensors, names, self.dynamic)
        return found


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is on the device beside the graph's inputs, and the optimizer step."""

    blocks: tuple[Block, ...]
    """Optimizer state, resident gradients, other bytes."""
    optimizer: Trace | None

    @property
    def bytes(self) -> int:
        """Sum of the blocks."""
        return sum(int(block.size) for block in self.blocks)


def prepare(request: Request) -> Prepared:
    """The captured step; with sizes as numbers if it cannot be captured with symbols."""
    captured = partial(
        prepare_step,
        request.module,
        request.args,
        request.kwargs,
        forward=request.forward,
        loss_fn=request.loss_fn,
        protocol=request.protocol,
        cuda=planned_for_cuda(request.module, request.cost_model),
    )
    if request.dynamic:
        with contextlib.suppress(UnsupportedGraphError):
            return captured(dynamic=request.dynamic)
    return captured()


def symbolic_eager(request: Request) -> EagerStep | None:
    """The eager step with symbolic sizes; None if it needs them as numbers."""
    try:
        return eager_step(
            request.module,
            request.args,
            request.kwargs,
            loss_fn=request.loss_fn,
            loop=Loop(
                gradients_resident=request.protocol.gradients_resident,
                outputs_held=request.protocol.outputs_held,
            ),
            dynamic=request.dynamic,
            cuda=planned_for_cuda(request.module, request.cost_model),
        )
    except (UnsupportedGraphError, RuntimeError):
        return None


def surroundings(request: Request, prepared: Prepared) -> Surroundings:
    """What the step finds on the device beside parameters, buffers and arguments."""
    protocol = request.protocol
    used = prepared.trained()  # an optimizer passes over a parameter without a gradient
    trained = [(n, p) for n, p in request.module.named_parameters() if n in used]
    blocks: list[Block] = []
    trace: Trace | None = None
    if request.optimizer.instance is not None:
        trace = optimizer_trace(
            [p for _, p in trained],
            request.optimizer.instance,
            scratch=scratch_for(request.module),
        )
        blocks += [block for block in trace.blocks if block.role is Role.OPTIMIZER_STATE]
    if protocol.other_bytes:
        blocks.append(Block(BESIDE, Role.BUFFER, sympy.Integer(protocol.other_bytes), -1, 0))
    several = protocol.forwards_outstanding > 1
    if protocol.gradients_resident or several:
        blocks += [
            Block(f"{name}.grad", Role.GRADIENT, sympy.Integer(p.nbytes), -1, 0)
            for name, p in trained
        ]
    if protocol.gradients_resident and several:  # one backward through all of them adds up first
        blocks += [
            Block(f"{name}, to be added", Role.TEMPORARY, sympy.Integer(p.nbytes), -1, 0)
            for name, p in trained
        ]
    return Surroundings(tuple(blocks), trace)


def eager_of(request: Request, around: Surroundings) -> Trace:
    """The step as eager runs it at the request's sizes."""
    trace = eager_trace(
        request.module,
        request.args,
        request.kwargs,
        loss_fn=request.loss_fn,
        gradients_resident=request.protocol.gradients_resident,
        outputs_held=request.protocol.outputs_held,
        scratch=scratch_for(request.module),
        cuda=planned_for_cuda(request.module, request.cost_model),
    )
    return beside_eager(trace, around)


def beside_eager(trace: Trace, around: Surroundings) -> Trace:
    """An eager forward and backward with what is beside it; resident gradients are in the trace."""
    beside = [block for block in around.blocks if block.role is not Role.GRADIENT]
    return whole_step(trace, beside, around.optimizer)
