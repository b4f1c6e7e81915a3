"""Dropout as eager computes it on the CPU.

While it traces, torch replaces `dropout` by `native_dropout`. On the CPU, eager does not: it draws a
float mask, divides it by 1 - p, and multiplies. The two round differently for some p (15 of the 99
values 0.01, .., 0.99), so a graph with `native_dropout` is not bit for bit the model.

Source of the eager form: `_dropout_impl` in ATen/native/Dropout.cpp.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch._C import DispatchKey

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
    order = sorted(range(input.dim()), key=lambda dim: -like.stride(dim))
    if input.permute(order).is_contiguous():
        like = input.detach()  # the values of the argument do not matter: spare the allocation
    drawn = torch.ops.aten.bernoulli.p(like.permute(order), 1 - p)
    inverse = sorted(range(input.dim()), key=order.__getitem__)
    return input * drawn.permute(inverse).div(1 - p)


@contextlib.contextmanager
def eager_dropout() -> Iterator[None]:
    """Trace `dropout` on CPU tensors as eager runs it."""
    op = torch.ops.aten.dropout.default
    before = {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels}
    try:
        for key in before:
            op.py_kernels[key] = _dropout
        op._dispatch_cache.clear()
        yield
    finally:
        op.py_kernels.update(before)
        op._dispatch_cache.clear()
