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
    (4) (2) and (3) again for every further micro-batch; see `loop.Loop`.
    (5) The optimizer step, then gradients are dropped, unless they are resident. Without an optimizer
        they outlive the step.
The first step differs in that the optimizer makes its state in it.

Sizes may be symbols: the trace then holds for all values within its `domain`, and takes the branches
that the example takes.

Garbage is collected by reference counts only, so a reference cycle holds its tensors to the end.

Not handled: output sizes that depend on data, optimizers that need a closure.
Autocast is taken as it is around the call. See `eager_stage` for hooks and tensor kinds.
"""

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import sympy
import torch
from torch import nn

from remat.ir import Role, Trace, UnsupportedGraphError
from remat.ir._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    ShapeEnv,
    compiling_state,
    enable_python_dispatcher,
)
from remat.ir.device_kernels import cuda_kernels
from remat.ir.domain import Domain, Fixed, Sizes, fixed_sizes, noted_domain
from remat.ir.eager_kernels import own_kernels
from remat.ir.fake import Dynamic, fake_tensors, sizes_of
from remat.ir.functional import argument_names
from remat.ir.structure import put_tensors, take_tensors
from remat.ir.symbols import Names
from remat.ir.untouched import put_back, python_state

from .eager_follow import Follow
from .eager_phases import LossFn, OptimizerPhase, forward_backward, make_gradients
from .eager_stage import Stage
from .loop import Loop, only_first, without_first
from .realize import Call
from .scratch import Origin, Scratch
from .scratch_fit import FittedScratch

ScratchOf = Callable[[Sequence[Call]], Sequence[Scratch]]
"""Scratch of every call; `measure_scratch` is one."""
_STEADY = Loop()


@dataclass(frozen=True, slots=True)
class EagerStep:
    """An eager step that was followed, without the scratch of its kernels."""

    trace: Trace
    """A step whose optimizer state exists."""
    calls: tuple[Call, ...]
    """The op of every instant."""
    first_trace: Trace
    """The first step."""
    first_calls: tuple[Call, ...]
    domain: Domain
    """Sizes for which it holds."""
    fixed: tuple[Fixed, ...]
    """Sizes above 1 that were named, and that the step needs as numbers."""


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
    """Trace of one steady-state training step of `model` as eager runs it; see `eager_step`.

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
    """
    step = eager_step(
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        loop=Loop(gradients_resident=gradients_resident, outputs_held=outputs_held),
        cuda=cuda,
    )
    return with_scratch(step.trace, scratch(step.calls))


def eager_step(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loop: Loop = _STEADY,
    dynamic: Dynamic | None = None,
    cuda: bool = False,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    dtype: torch.dtype | None = None,
) -> EagerStep:
    """Follow one training step of `model` as eager runs it.

    Model, optimizer and random states are left as they were.

    Args:
        model: see `eager_trace`, likewise `args`, `kwargs`, `loss_fn`, `optimizer` and `cuda`.
        args: positional arguments.
        kwargs: keyword arguments.
        loss_fn: output to a scalar.
        optimizer: over the parameters of `model`.
        loop: what else the step does.
        dynamic: sizes that become symbols, by argument name: ``{"input_ids": {0: "batch", 1: "seq"}}``;
            those that are 1 in the example stay numbers.
        cuda: run the kernels of a CUDA device.
        autocast: context of forward and loss.
        dtype: type that floating-point tensors of model and arguments are taken to have; None: theirs.

    Raises:
        UnsupportedGraphError: if the step depends on values that are not known.
        ValueError: if `loss_fn` does not return one scalar that requires a gradient.
    """

    def follow_step(state: AbstractContextManager[None]) -> EagerStep:
        with fakes(cuda, autocast, dtype) as (follow, stage), stage.model(model) as parameters:
            if loop.gradients_resident:
                make_gradients(follow, parameters)
            twin = stage.optimizer(optimizer) if optimizer else None
            arguments, names, example = _fake_arguments(
                follow, stage, model, (args, kwargs), dynamic
            )
            with running(follow), state, kernels(cuda, bool(dynamic)):
                kept = forward_backward(follow, model, arguments, loss_fn, loop)
            for name, parameter in parameters:
                if parameter.grad is not None:
                    follow.label(parameter.grad, Role.GRADIENT, f"{name}.grad")
            marks = [follow.count] * 2
            if twin is not None:
                with running(follow):
                    phase = OptimizerPhase(follow, twin, loop)
                    phase.run(first=True)
                    marks[1] = follow.count
                    phase.run()
                if not loop.gradients_resident:
                    for _, parameter in parameters:
                        parameter.grad = None
            step = followed(follow, names, example, marks)
            del kept
        return step

    state = python_state(model)
    try:
        with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
            return follow_step(nullcontext())
        # many models have a path without questions about values, for compilers
        return follow_step(compiling_state())
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedGraphError(
            f"The step depends on values of tensors, which a trace does not have: {error}. "
            "Pass arguments with data, or avoid the op."
        ) from error
    finally:  # the forward ran on fake tensors, which must stay nowhere
        put_back(state)


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
    with fakes() as (follow, stage):
        named = [
            (f"parameter_{number}", stage.fake(real, f"parameter_{number}", Role.PARAMETER))
            for number, real in enumerate(parameters)
        ]
        make_gradients(follow, [(name, p) for name, p in named if p.requires_grad])
        twin = stage.optimizer(optimizer)
        with running(follow):
            OptimizerPhase(follow, twin, _STEADY).run()
        trace = follow.trace()
    return with_scratch(trace, scratch(follow.calls))


def with_scratch(trace: Trace, scratch: Sequence[Scratch | FittedScratch]) -> Trace:
    """The trace with the scratch of every instant, in bytes or as an expression."""
    instants = tuple(
        replace(instant, scratch=sympy.sympify(each.bytes))
        for instant, each in zip(trace.instants, scratch, strict=True)
    )
    return replace(trace, instants=instants)


@contextlib.contextmanager
def fakes(
    cuda: bool = False,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Follow, Stage]]:
    """An empty record and an empty stage; random states and the collector are put back after."""
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    random_state = random.getstate()
    collecting = gc.isenabled()
    gc.disable()
    try:
        env = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
        )
        mode = FakeTensorMode(shape_env=env)
        # Copies of its fakes are its fakes.
        mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]
        follow = Follow(mode, cuda, autocast)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield follow, Stage(follow.mode, follow, dtype)
    finally:
        random.setstate(random_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if collecting:
            gc.enable()


@contextlib.contextmanager
def running(follow: Follow) -> Iterator[None]:
    """Run on fakes and record."""
    with follow.mode, follow, torch.enable_grad():
        yield


@contextlib.contextmanager
def kernels(cuda: bool, symbolic: bool) -> Iterator[None]:
    """Decompose composite ops as CUDA does, or at least without numbers for sizes."""
    if not (cuda or symbolic):
        yield
        return
    with enable_python_dispatcher(), own_kernels(), cuda_kernels() if cuda else nullcontext():
        yield


def _fake_arguments(
    follow: Follow,
    stage: Stage,
    model: nn.Module,
    arguments: tuple[tuple[object, ...], Mapping[str, object]],
    dynamic: Dynamic | None,
) -> tuple[tuple[tuple[object, ...], Mapping[str, object]], Mapping[str, str], Sizes]:
    """Fakes of the arguments, the user's name of each symbol in their sizes, and the named sizes."""
    tensors, pattern = take_tensors(arguments)
    if not dynamic:
        inputs = [stage.fake(t, f"input_{i}", Role.INPUT) for i, t in enumerate(tensors)]
        return put_tensors(pattern, inputs), {}, {}
    labels = argument_names(model.forward, pattern, len(tensors))
    tensors = [stage.converted(tensor) for tensor in tensors]
    fakes, names = fake_tensors(follow.mode, tensors, labels, dynamic)
    for number, (real, fake) in enumerate(zip(tensors, fakes, strict=True)):
        stage.place(real, fake, f"input_{number}", Role.INPUT)
    return put_tensors(pattern, fakes), names, sizes_of(tensors, labels, dynamic)


def followed(
    follow: Follow, names: Mapping[str, str], example: Sizes, marks: Sequence[int]
) -> EagerStep:
    """The record, which has two optimizer phases: from the first mark to the second, and after.

    Args:
        follow: holds the record.
        names: the user's name of each symbol.
        example: every named size, with its number.
        marks: instants.
    """
    env = follow.mode.shape_env
    assert env is not None
    domain = noted_domain(env, example, names)
    follow.names = Names(names, domain.numbers)
    trace, calls = follow.trace(), follow.calls
    return EagerStep(
        trace=without_first(trace, *marks),
        calls=calls[: marks[0]] + calls[marks[1] :],
        first_trace=only_first(trace, marks[1]),
        first_calls=calls[: marks[1]],
        domain=domain,
        fixed=fixed_sizes(env, domain, names),
    )
