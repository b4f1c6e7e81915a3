"""The entry point `analyze`: the memory of a training step as it runs today."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir.device_autocast import cuda_autocast
from remat.passes import device as known_device
from remat.passes.cuda_scratch import cuda_scratch
from remat.passes.device_memory import DeviceOverheads, overheads_for
from remat.passes.eager_callable import callable_step
from remat.passes.loop import Loop

from .budget import device_memory
from .example import StepRequest, automatic, follow_example, named_sizes
from .optimizers import find_optimizer
from .options import check_dynamic, check_example, check_loss, device_of
from .regions import Regions, Target
from .report import MemoryReport
from .report_formulas import make_report

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = (*_TYPES, "bf16-mixed", "fp16-mixed")


def analyze(
    model: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Optimizer | str | None = "auto",
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    device: str | None = None,
    precision: str | None = None,
    accumulation_steps: int = 1,
    outputs_held: bool = False,
    set_to_none: bool = True,
    clip_gradients: bool = False,
    grad_scaler: bool = False,
    master_weights: bool = False,
    overheads: DeviceOverheads | None = None,
) -> MemoryReport:
    """How much memory a training step takes, when, and for what: as formulas and at sizes.

    The step is followed on tensors without data as eager runs it today, for a device that need not be at
    hand. Nothing of the model or the optimizer is changed.

    Args:
        model: in the mode in which it trains; its parameters may be on the meta device.
        example_args: positional arguments of one training call; real, fake or meta tensors.
        example_kwargs: keyword arguments of that call.
        loss_fn: output of the model to a scalar, if the loss is outside the model.
        optimizer: an optimizer, a name in `torch.optim`, or None; "auto" takes the live optimizer that holds
            the parameters, else assumes AdamW.
        dynamic: sizes that become symbols, by argument name: ``{"input_ids": {0: "batch", 1: "seq"}}``.
            Without it the leading dimension that most arguments share is ``batch``; ``{}`` for none.
        device: "cpu", or a GPU by name, such as "cuda:A100-80GB"; see `remat.passes.devices`. Without it the
            one that the model is on.
        precision: "fp32", "bf16" or "fp16": the model and its floating-point arguments are taken to have
            this type. "bf16-mixed" or "fp16-mixed": autocast around forward and loss. Without it the
            model as it is, under the autocast that surrounds the call.
        accumulation_steps: forwards and backwards for each optimizer step.
        outputs_held: a variable holds the model's output to the end of the step.
        set_to_none: `zero_grad` drops gradients; else they are there when the next step begins.
        clip_gradients: `clip_grad_norm_` before the optimizer step.
        grad_scaler: a `GradScaler` scales the loss, and gradients are divided before the step.
        master_weights: the optimizer steps on float32 copies of the parameters.
        overheads: workspaces, context and communicators on the GPU; without it what is known of the device,
            `remat.passes.device_memory.overheads_for`.

    Raises:
        UnsupportedGraphError: the step depends on values of tensors that are not known.
        ValueError: an option that cannot be read, a size that has two values.
        TypeError: the model is no module, or the example arguments do not fit its forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    check_example(example_args)
    check_loss(loss_fn)
    if dynamic is not None:
        check_dynamic(dynamic, model)
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    _check_arguments(model, args, kwargs)
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, not {accumulation_steps}")
    if not model.training:
        warnings.warn(
            "remat: the model is in evaluation mode, and that is what the report describes: no dropout, "
            "statistics of normalisation as they are. model.train() is what a training step runs in.",
            stacklevel=2,
        )
    target, memory = _target(device_of(model), device, overheads)
    assumed = find_optimizer(model, optimizer)
    _check_steps(assumed.instance)
    request = StepRequest(
        model=model,
        args=args,
        kwargs=kwargs,
        loss_fn=loss_fn,
        optimizer=assumed.instance,
        loop=Loop(
            accumulation_steps=accumulation_steps,
            gradients_resident=not set_to_none,
            outputs_held=outputs_held,
            clips_gradients=clip_gradients,
            scales_loss=grad_scaler,
            master_weights=master_weights,
        ),
        dynamic=automatic(model, args, kwargs) if dynamic is None else dynamic,
        cuda=target.cuda,
        autocast=_autocast(precision, target),
        autocasts=bool(precision and precision.endswith("-mixed")),
        dtype=_TYPES.get(precision or ""),
    )
    regions = Regions(partial(follow_example, request), named_sizes(request), target)
    return make_report(
        regions,
        loop=request.loop,
        request=request,
        model=type(model).__name__,
        precision=precision or "as it is",
        optimizer=assumed.how,
        device_memory=memory,
    )


def analyze_step(
    build: Callable[..., Callable[[], object]],
    sizes: Mapping[str, int],
    *,
    device: str = "cpu",
    overheads: DeviceOverheads | None = None,
) -> MemoryReport:
    """The memory of any training step that is a Python function; see `analyze`.

    Args:
        build: is called with `sizes` as keyword arguments, makes all that the step needs (models, data,
            optimizers: none of it takes memory) and returns the step, a function without arguments. What it
            makes on the CPU stands for tensors on the device, and `torch.autocast("cpu", ...)` for the
            device's. Sizes above 1 come as symbols (`torch.SymInt`), which serve as shapes.
        sizes: example value of every size.
        device: see `analyze`.
        overheads: see `analyze`.

    Raises:
        UnsupportedGraphError: the step depends on values of tensors.
        ValueError: no such device.
    """
    target, memory = _target(torch.device("cpu"), device, overheads)
    follow = partial(callable_step, build, cuda=target.cuda, autocast=_autocast(None, target))
    return make_report(
        Regions(follow, dict(sizes), target),
        loop=Loop(),
        request=None,
        model=getattr(build, "__name__", "step"),
        precision="as it is",
        optimizer="that of the step",
        device_memory=memory,
    )


def _check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"the example arguments do not fit the model's forward: {error}"
        ) from error


def _check_steps(optimizer: Optimizer | None) -> None:
    """Refuse optimizers that need more than gradients."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls forward and backward itself, as a closure, any number of times in one step. "
            "Analyse the model with optimizer=None, and add its history: 2 x history_size + 4 vectors as "
            "large as all parameters."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam steps on sparse gradients, whose sizes depend on data. Analyse with "
            "optimizer=None."
        )


def _target(
    here: torch.device, wanted: str | None, overheads: DeviceOverheads | None
) -> tuple[Target, int]:
    """Where the step runs, and the memory of that device, bytes."""
    if wanted is None and here.type == "cuda":
        name = torch.cuda.get_device_name(here)
        return Target(name, True, True, overheads or overheads_for(name)), device_memory(here)
    if wanted in (None, "cpu"):
        return Target("cpu", False, True), device_memory(torch.device("cpu"))
    found = known_device(wanted)
    beside = overheads or overheads_for(found.name)
    return Target(found.name, True, False, beside, cuda_scratch), found.memory_bytes


def _autocast(precision: str | None, target: Target) -> Callable[[], AbstractContextManager[None]]:
    """Context of forward and loss.

    Raises:
        ValueError: no such precision.
    """
    if precision is not None and precision not in _PRECISIONS:
        raise ValueError(f"no precision {precision!r}; there are: {', '.join(_PRECISIONS)}")
    if precision is None or not precision.endswith("-mixed"):
        return cuda_autocast if target.cuda and not target.measures else nullcontext
    dtype = _TYPES[precision.removesuffix("-mixed")]
    return lambda: _cast(dtype, target)


@contextlib.contextmanager
def _cast(dtype: torch.dtype, target: Target) -> Iterator[None]:
    stands_in = target.cuda and not target.measures
    at_hand = "cuda" if target.cuda and target.measures else "cpu"
    with cuda_autocast() if stands_in else nullcontext(), torch.autocast(at_hand, dtype):
        yield
