"""Event trace of any training step that is a Python function, built and run on fake tensors.

For steps that are more, or less, than a model with a loss and an optimizer: several models, a benchmark of
one layer, a loop with its own order of things. `build` makes everything the step needs and returns the
step; it is called with the sizes, which may be symbols.

What `build` leaves alive is resident. The step is run twice; the first run is the first step, the second,
with all that the first has left (gradients, optimizer state), every later one.

Phases. An op that autograd's engine runs is backward; one outside it, after the first backward and
without gradient mode, belongs to the optimizer step; all others are forward.

Not handled: what `eager` does not handle; steps whose third run differs from the second.
"""

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from remat.ir import Phase, Role, UnsupportedGraphError
from remat.ir._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    graph_task_id,
)
from remat.ir.fake import fake_tensors

from .eager import EagerStep, fakes, followed, kernels, running
from .eager_follow import Follow
from .eager_phases import label_state
from .eager_stage import step_as_on_a_gpu

Build = Callable[..., Callable[[], object]]


def callable_step(
    build: Build,
    sizes: Mapping[str, int],
    *,
    cuda: bool = False,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> EagerStep:
    """Follow a step that is a function.

    Args:
        build: called with every size by name; returns the step.
        sizes: example values; those above 1 become symbols.
        cuda: run the kernels of a CUDA device.
        autocast: context of the step.

    Raises:
        UnsupportedGraphError: the step depends on values of tensors.
        TypeError: `build` returns no function.
    """
    try:
        with fakes(cuda) as (follow, _):
            symbols, names = _symbols(follow, sizes)
            hook = register_optimizer_step_pre_hook(_as_on_a_gpu if cuda else _nothing)
            try:
                with running(follow), kernels(cuda, symbolic=True):
                    with follow.preparing(), warnings.catch_warnings():
                        # Of copies of modules, which ask where a tensor's data lie.
                        warnings.filterwarnings("ignore", "Accessing the data pointer")
                        step = build(**symbols)
                    if not callable(step):
                        raise TypeError(
                            f"build returns the step, a function without arguments, not {step!r}"
                        )
                    _label(follow)
                    marks = [0]
                    for _ in range(2):
                        follow.find_phase = _phases()
                        with autocast():
                            step()
                        _label(follow)
                        marks.append(follow.count)
            finally:
                hook.remove()
            found = followed(follow, names, sizes, marks[:2])
            del step
        return found
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedGraphError(
            f"The step depends on values of tensors, which a trace does not have: {error}"
        ) from error


def _symbols(
    follow: Follow, sizes: Mapping[str, int]
) -> tuple[dict[str, int | torch.SymInt], Mapping[str, str]]:
    wanted = {name: size for name, size in sizes.items() if size > 1}
    if not wanted:
        return dict(sizes), {}
    shaped = torch.empty(tuple(wanted.values()), device="meta")
    (fake,), names = fake_tensors(
        follow.mode, [shaped], ["sizes"], {"sizes": dict(enumerate(wanted))}
    )
    return {**sizes, **dict(zip(wanted, fake.shape, strict=True))}, names


def _phases() -> Callable[[Phase], Phase]:
    """Tells the phase of each op of one step."""
    backward_began = False

    def find(now: Phase) -> Phase:
        nonlocal backward_began
        if graph_task_id() != -1:
            backward_began = True
            return Phase.BACKWARD
        after = backward_began and not torch.is_grad_enabled()
        return Phase.OPTIMIZER if after else Phase.FORWARD

    return find


def _nothing(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The CPU's optimizers are as they are."""


def _as_on_a_gpu(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    step_as_on_a_gpu(optimizer)


def _label(follow: Follow) -> None:
    """Say what the storages are for that parameters, their gradients and optimizers hold."""
    objects = gc.get_objects()
    for found in objects:
        kind = type(found)
        if issubclass(kind, torch.Tensor) and _is_ours(follow, found):
            if isinstance(found, nn.Parameter):
                follow.label(found, Role.PARAMETER)
            if found.is_leaf and found.grad is not None:
                follow.label(found.grad, Role.GRADIENT)
    for found in objects:
        if issubclass(type(found), Optimizer) and hasattr(found, "param_groups"):
            parameters = [p for group in found.param_groups for p in group["params"]]
            if any(_is_ours(follow, p) for p in parameters):
                label_state(follow, found, parameters)


def _is_ours(follow: Follow, tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is follow.mode
