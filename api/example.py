"""The example call of `analyze`: its named sizes, and the same call at other sizes."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.ir._torch import FakeTensor
from remat.ir.fake import Dynamic, sizes_of
from remat.ir.functional import argument_names
from remat.ir.structure import put_tensors, take_tensors
from remat.passes.eager import EagerStep, eager_step
from remat.passes.loop import Loop


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The step that is analysed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    loop: Loop
    dynamic: Dynamic
    cuda: bool
    """The kernels of a CUDA device."""
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    autocasts: bool = False
    """That context casts."""
    dtype: torch.dtype | None = None
    """Floating-point tensors of model and arguments are taken to have this type."""


def named_sizes(request: StepRequest) -> dict[str, int]:
    """The example's value of every name.

    Raises:
        ValueError: a name has two values, or an argument or dimension does not exist.
    """
    tensors, names, _ = _named_tensors(request)
    for argument in request.dynamic:
        # Given without a name of its own: the same tensor as another argument, or no tensor.
        if argument not in names and not _is_given(request, argument):
            known = ", ".join(dict.fromkeys(name for name in names if name))
            raise ValueError(f"dynamic: no argument {argument!r} with tensors; there are: {known}")
    found: dict[str, int] = sizes_of(tensors, names, request.dynamic)
    return found


def _is_given(request: StepRequest, argument: str) -> bool:
    signature = inspect.signature(request.model.forward)
    given = signature.bind(*request.args, **request.kwargs).arguments
    return argument in given or argument in request.kwargs


def automatic(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dynamic:
    """`dynamic` for the leading dimension of all arguments that share it, as ``batch``."""
    tensors, pattern = take_tensors((args, dict(kwargs)))
    names = argument_names(model.forward, pattern, len(tensors))
    leading = [int(tensor.shape[0]) for tensor in tensors if tensor.dim()]
    if not leading:
        return {}
    batch = max(leading, key=leading.count)
    return {
        name: {0: "batch"}
        for tensor, name in zip(tensors, names, strict=True)
        if name and tensor.dim() and tensor.shape[0] == batch
    }


def _named_tensors(request: StepRequest) -> tuple[list[torch.Tensor], list[str], object]:
    tensors, pattern = take_tensors((request.args, dict(request.kwargs)))
    return tensors, argument_names(request.model.forward, pattern, len(tensors)), pattern


def resized(
    request: StepRequest, sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The example's arguments at other sizes: their elements repeated in turn."""
    tensors, names, pattern = _named_tensors(request)
    changed = [
        _cycled(tensor, {d: sizes[n] for d, n in request.dynamic.get(name, {}).items()})
        for tensor, name in zip(tensors, names, strict=True)
    ]
    brought: tuple[tuple[Any, ...], dict[str, Any]] = put_tensors(pattern, changed)
    return brought


def _cycled(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    result = tensor.detach()
    mode = result.fake_mode if isinstance(result, FakeTensor) else nullcontext()
    with mode:
        for dim, size in sizes.items():
            if result.shape[dim] != size:
                picks = torch.arange(size, device=result.device) % max(1, result.shape[dim])
                result = result.index_select(dim, picks)
    return tensor if result.shape == tensor.shape else result.requires_grad_(tensor.requires_grad)


def follow_example(request: StepRequest, sizes: Mapping[str, int]) -> EagerStep:
    """The step at `sizes`; those above 1 are symbols."""
    args, kwargs = resized(request, sizes)
    return eager_step(
        request.model,
        args,
        kwargs,
        loss_fn=request.loss_fn,
        optimizer=request.optimizer,
        loop=request.loop,
        dynamic=request.dynamic,
        cuda=request.cuda,
        autocast=request.autocast,
        dtype=request.dtype,
    )
