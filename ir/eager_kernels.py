"""Kernels that eager runs and that torch replaces while it traces.

Some ops have a second implementation in Python, which is taken under a trace only. A graph made of it
is not bit for bit the model:
    dropout   is replaced by `native_dropout`. On the CPU, eager draws a float mask, divides it by 1 - p,
              and multiplies; the two round differently for some p (15 of the 99 values 0.01, .., 0.99).
              Source of the eager form: `_dropout_impl` in ATen/native/Dropout.cpp.
    upsample  is replaced by indexing, whose gradient comes in another memory layout (channels last is
              lost), and later kernels round by layout. The kernel itself is traced instead, with the output
              size computed here, since eager's code for it takes no symbols.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    if input.device.type != "cpu":
        return torch.native_dropout(input, p, train)[0]
    # Eager draws in the order of memory into a dense tensor with the strides of the input, whereas
    # bernoulli.p draws into a contiguous one: so draw with the dimensions in the order of memory.
    like = torch.empty_like(input)
    strides = like.stride()
    order = sorted(range(input.dim()), key=lambda dim: -strides[dim])
    if input.permute(order).is_contiguous():
        like = input.detach()  # the values of the argument do not matter: spare the allocation
    drawn: torch.Tensor = torch.ops.aten.bernoulli.p(like.permute(order), 1 - p)
    inverse = sorted(range(input.dim()), key=order.__getitem__)
    return input * drawn.permute(inverse).div(1 - p)


def _upsampling() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        if name.lstrip("_").startswith("upsample_"):
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _with_sizes(packet: Any) -> Callable[..., torch.Tensor]:
    """What an overload of upsampling does that is given a size or factors: it calls the default one."""

    def upsample(input: torch.Tensor, size: Any, *options: Any) -> torch.Tensor:
        *flags, factors = options
        if size is None:
            size = [_scaled(n, factor) for n, factor in zip(input.shape[2:], factors, strict=True)]
        missing = [None] * (input.dim() - 2)
        result: torch.Tensor = packet.default(input, size, *flags, *(factors or missing))
        return result

    return upsample


def _scaled(size: int | torch.SymInt, factor: float) -> int | torch.SymInt:
    return size * int(factor) if factor == int(factor) else torch.sym_int(size * factor)  # type: ignore[no-untyped-call]


def eager_kernels() -> AbstractContextManager[None]:
    """Trace the ops above as eager runs them."""
    return python_kernels({torch.ops.aten.dropout.default: _dropout, **_upsampling_kernels()})


def own_kernels() -> AbstractContextManager[None]:
    """Let the ops above run their own kernels, for a run on symbolic sizes that no graph is made of."""
    return python_kernels({torch.ops.aten.dropout.default: None, **_upsampling_kernels()})


def _upsampling_kernels() -> dict[OpOverload, Callable[..., Any] | None]:
    return {
        op: _with_sizes(op.overloadpacket) if op._overloadname == "vec" else None
        for op in _upsampling()
    }


@contextlib.contextmanager
def python_kernels(kernels: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace the implementations in Python that a trace takes; needs torch's Python dispatcher.

    Args:
        kernels: op -> what is traced for it; None for the op's own kernel.
    """
    before = {op: dict(op.py_kernels) for op in kernels}
    try:
        for op, kernel in kernels.items():
            for key in _KEYS:
                if kernel is None:
                    op.py_kernels.pop(key, None)
                else:
                    op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
        yield
    finally:
        for op, found in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(found)
            op._dispatch_cache.clear()
