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
    # Eager draws into an uninitialised, contiguous tensor; values of the argument do not matter.
    like = input.detach() if input.is_contiguous() else input.new_empty(input.shape)
    return input * torch.ops.aten.bernoulli.p(like, 1 - p).div(1 - p)


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
