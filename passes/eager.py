"""Event trace of the eager step: what a training step holds when, as it runs today.

The step (forward, loss, backward, optimizer) runs on fake tensors while its storages are followed, so
Python's references and autograd's saved tensors decide when memory is freed, as they do in the real
step. Modules' hooks, existing checkpointing and any optimizer are covered because they run.

The step that is described:
    (1) Before it, on the device: parameters, buffers, arguments, optimizer state, and every gradient
        if gradients are resident. Its arguments outlive it.
    (2) Forward, then the loss; the output is dropped as soon as the loss exists, unless it is held.
        A held output outlives the step.
    (3) Backward, from the loss. Without a loss function: from what the output calls its loss; else from
        every 0-dimensional floating-point tensor of the output that requires a gradient, together; else
        from all tensors that do. Each starts with a gradient of ones. A loss is kept to the end of the
        step, as loops do that print it.
    (4) The optimizer step, then gradients are dropped, unless they are resident. Without an optimizer
        they outlive the step.

Garbage is collected by reference counts only, so a reference cycle holds its tensors to the end.

Not handled: output sizes that depend on data, optimizers that need a closure, sizes as symbols.
Autocast is taken as it is around the call. See `eager_stage` for hooks and tensor kinds.
"""

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import nn

from remat.ir import Phase, Role, Trace, UnsupportedGraphError
from remat.ir._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    compiling_state,
    enable_python_dispatcher,
)
from remat.ir.device_kernels import cuda_kernels
from remat.ir.eager_kernels import eager_kernels
from remat.ir.structure import loss_of, put_tensors, take_tensors

from .eager_follow import LATE_STEP, Follow
from .eager_stage import Stage
from .realize import Call
from .scratch import Origin, Scratch

ScratchOf = Callable[[Sequence[Call]], Sequence[Scratch]]
"""Scratch of every call; `measure_scratch` is one."""
LossFn = Callable[[Any], torch.Tensor]


def no_scratch(calls: Sequence[Call]) -> Sequence[Scratch]:
    """Take every kernel to allocate nothing but its results."""
    return (Scratch(0, (), Origin.UNKNOWN),) * len(calls)


def eager_trace(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    gradients_resident: bool = False,
    outputs_held: bool = False,
    scratch: ScratchOf = no_scratch,
    cuda: bool = False,
) -> Trace:
    """Trace of one steady-state training step of `model` as eager runs it.

    Model, optimizer and random states are left as they were.

    Args:
        model: runs in the mode (training or not) it is in. Its tensors may have no data.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward.
        loss_fn: output to a scalar; None if the output holds the loss.
        optimizer: over the parameters of `model`; None for a step without an optimizer phase.
        gradients_resident: the gradient of every trainable parameter exists before the forward and
            is accumulated into.
        outputs_held: the caller keeps the output to the end of the step.
        scratch: bytes that kernels take inside.
        cuda: run the kernels of a CUDA device, wherever the tensors claim to be; see `device_kernels`.

    Raises:
        UnsupportedGraphError: if the step depends on values that are not known.
        ValueError: if `loss_fn` does not return one scalar that requires a gradient.
    """

    def traced(state: AbstractContextManager[None]) -> Trace:
        with _fakes() as (follow, stage), stage.model(model) as parameters:
            if gradients_resident:
                _make_gradients(follow, parameters)
            twin = stage.optimizer(optimizer) if optimizer else None
            tensors, pattern = take_tensors((args, kwargs))
            inputs = [stage.fake(t, f"input_{i}", Role.INPUT) for i, t in enumerate(tensors)]
            arguments = put_tensors(pattern, inputs)
            with _running(follow), state, _cuda() if cuda else nullcontext():
                kept = _forward_backward(follow, model, arguments, loss_fn, outputs_held)
            for name, parameter in parameters:
                if parameter.grad is not None:
                    follow.label(parameter.grad, Role.GRADIENT, f"{name}.grad")
            if twin is not None:
                _optimizer_phase(follow, twin)
                if not gradients_resident:
                    twin.zero_grad()
            trace = follow.trace()
            del kept
        return _with_scratch(trace, scratch(follow.calls))

    try:
        return traced(nullcontext())
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass
    try:  # many models have a path without questions about values, for compilers
        return traced(compiling_state())
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedGraphError(
            f"The step depends on values of tensors, which a trace does not have: {error}. "
            "Pass arguments with data, or avoid the op."
        ) from error


def optimizer_trace(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    scratch: ScratchOf = no_scratch,
) -> Trace:
    """Trace of one optimizer step alone, with its state and all gradients resident.

    The bytes of its state are the sizes of the blocks of role `OPTIMIZER_STATE`.

    Args:
        parameters: those of them that require a gradient have one.
        optimizer: over (some of) these parameters; left as it is, also if it has no state yet.
        scratch: bytes that kernels take inside.
    """
    with _fakes() as (follow, stage):
        fakes = [
            (f"parameter_{number}", stage.fake(real, f"parameter_{number}", Role.PARAMETER))
            for number, real in enumerate(parameters)
        ]
        _make_gradients(follow, [(name, p) for name, p in fakes if p.requires_grad])
        _optimizer_phase(follow, stage.optimizer(optimizer))
        trace = follow.trace()
    return _with_scratch(trace, scratch(follow.calls))


@contextlib.contextmanager
def _fakes() -> Iterator[tuple[Follow, Stage]]:
    """An empty record and an empty stage; random states and the collector are put back after."""
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state = random.getstate()
    collecting = gc.isenabled()
    gc.disable()
    try:
        mode = FakeTensorMode()
        follow = Follow(mode)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield follow, Stage(mode, follow)
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _running(follow: Follow) -> Iterator[None]:
    """Run on fakes and record."""
    with follow.mode, follow, torch.enable_grad():
        yield


@contextlib.contextmanager
def _cuda() -> Iterator[None]:
    """Decompose composite ops as CUDA does."""
    with enable_python_dispatcher(), eager_kernels(), cuda_kernels():
        yield


def _make_gradients(follow: Follow, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in parameters:
        with follow.mode:
            parameter.grad = torch.empty_like(parameter)
        follow.resident(parameter.grad, f"{name}.grad", Role.GRADIENT)


def _forward_backward(
    follow: Follow,
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    loss_fn: LossFn | None,
    outputs_held: bool,
) -> object:
    """Run both phases; returns what the caller keeps: the loss, and the output if it is held."""
    args, kwargs = arguments
    with follow.paths(model):
        output = model.forward(*args, **kwargs)
    for tensor in _tensors(output):
        follow.label(tensor, Role.OUTPUT)
    roots = _roots(output) if loss_fn is None else [_scalar(loss_fn(output))]
    held = output if outputs_held else None
    del output, tensor
    follow.phase = Phase.BACKWARD
    tangents = [torch.ones_like(root) for root in roots]
    for tangent in tangents:
        follow.label(tangent, Role.TANGENT)
    torch.autograd.backward(roots, tangents)
    return held, [root for root in roots if root.dim() == 0]


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    found, _ = take_tensors(value)
    tensors = tuple(found)
    found.clear()  # it is in a reference cycle, which would hold the tensors
    return tensors


def _roots(output: object) -> list[torch.Tensor]:
    """Tensors of the output from which backward starts."""
    candidates = [t for t in _tensors(output) if t.requires_grad]
    if not candidates:
        raise UnsupportedGraphError(
            "No tensor of the model's output requires a gradient, so there is no backward. "
            "Give a loss function, or train at least one parameter."
        )
    loss = loss_of(output)
    scalars = [t for t in candidates if t.dim() == 0 and t.is_floating_point()]
    return [loss] if loss is not None else scalars or candidates


def _scalar(loss: object) -> torch.Tensor:
    """What a loss function has returned, if backward can start from it."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"loss_fn must return one scalar, got {type(loss).__name__}")
    if loss.dim() > 0:
        raise ValueError(f"loss_fn must return one scalar, got shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn must return a scalar that requires a gradient; it uses no output that does"
        )
    return loss


def _optimizer_phase(follow: Follow, twin: torch.optim.Optimizer) -> None:
    """One late step, with the state that the steps before it have left."""
    follow.phase = Phase.OPTIMIZER
    step: Any = type(twin).step
    parameters = [p for group in twin.param_groups for p in group["params"]]
    with _running(follow):
        with follow.preparing(), torch.no_grad():
            if any(p.grad is not None and not twin.state.get(p) for p in parameters):
                step(twin)
            for state in twin.state.values():
                if isinstance(count := state.get("step"), torch.Tensor):
                    count.fill_(LATE_STEP)  # some optimizers do otherwise in their first steps
        _label_state(follow, twin, parameters)
        step(twin)


def _label_state(
    follow: Follow, twin: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> None:
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for parameter, state in twin.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                name = f"state.{numbers[id(parameter)]}.{key}"
                follow.label(value, Role.OPTIMIZER_STATE, name)


def _with_scratch(trace: Trace, scratch: Sequence[Scratch]) -> Trace:
    instants = tuple(
        replace(instant, scratch=sympy.Integer(each.bytes))
        for instant, each in zip(trace.instants, scratch, strict=True)
    )
    return replace(trace, instants=instants)
