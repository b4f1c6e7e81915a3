"""Scratch of CUDA kernels by formula, for a step that is described for a GPU that is not at hand.

Formulas, from torch's sources (aten/src/ATen/native):
    flash attention backward   (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd): the sums of the
        gradient times the output, float32, batch x heads x queries rounded up to 128; an accumulator of
        the gradient of the queries, float32, batch x queries rounded up to 128 x heads x width rounded
        up to 32 (beyond 128: to 64); with fewer heads of keys than of queries, the gradients of keys and
        values for all heads of queries.
    memory-efficient attention backward   (transformers/cuda/attention_backward.cu): the same sums, batch x
        heads x queries.
    dense gradient of an embedding   (cuda/EmbeddingBackwardKernel.cu): with more than 3072 indices, the
        indices sorted with where they were (twice each), and partial sums in float32, at most one row
        for every index: their number depends on the data, so this is a reserve.

All others, the workspaces of cuDNN and of reductions and sorts among them, are unknown and taken as 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from .realize import Call, TensorSpec
from .scratch import Origin
from .scratch_fit import FittedScratch

aten = torch.ops.aten
_FLOAT = 4
_INDEX = 8
_FEW_INDICES = 3072
_WITHOUT = frozenset(
    "clone copy copy_ _to_copy empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like "
    "ones ones_like full full_like fill fill_ zero_ new_zeros new_ones new_full scalar_tensor arange "
    "add add_ sub sub_ mul mul_ div div_ neg pow sqrt rsqrt exp log tanh sigmoid relu silu gelu where "
    "threshold_backward tanh_backward sigmoid_backward silu_backward gelu_backward maximum minimum "
    "eq ne lt le gt ge logical_not logical_and bitwise_and bitwise_not masked_fill addcmul addcmul_ "
    "addcdiv addcdiv_ lerp lerp_ clamp clamp_min native_dropout native_dropout_backward".split()
)
"""Ops that write or compute element by element: their kernels are one pass over operands and result
(aten/src/ATen/native/cuda/Loops.cuh, FillKernel.cu, Copy.cu between types on one device)."""


def cuda_scratch(calls: Sequence[Call]) -> list[FittedScratch]:
    """Scratch of every described call on a CUDA device."""
    return [_of(call) for call in calls]


def _of(call: Call) -> FittedScratch:
    if call.target in _FORMULAS:
        return _FORMULAS[call.target](*call.args)
    none = getattr(call.target, "is_view", False) or _name(call.target) in _WITHOUT
    return FittedScratch(sympy.S.Zero, Origin.FORMULA if none else Origin.UNKNOWN)


def _name(target: Any) -> str:
    return str(target).split(".")[1] if str(target).count(".") > 1 else ""


def _flash_backward(
    grad_out: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, *rest: Any
) -> FittedScratch:
    batch, heads, queries, width = query.shape
    rows = _up(queries, 128)
    columns = _up(width, 32 if isinstance(width, int) and width <= 128 else 64)
    size = _FLOAT * batch * heads * rows * (1 + columns)
    if key.shape[1] != heads:
        size += 2 * query.dtype.itemsize * batch * key.shape[2] * heads * width
    return FittedScratch(sympy.sympify(size), Origin.FORMULA)


def _efficient_backward(grad_out: TensorSpec, query: TensorSpec, *rest: Any) -> FittedScratch:
    batch, heads, queries, _ = query.shape
    return FittedScratch(sympy.sympify(_FLOAT * batch * heads * queries), Origin.FORMULA)


def _embedding_backward(grad: TensorSpec, indices: TensorSpec, *rest: Any) -> FittedScratch:
    count = sympy.sympify(sympy.prod(indices.shape))
    many = 4 * _INDEX * count + _FLOAT * count * grad.shape[-1]
    size = many if count.free_symbols or count > _FEW_INDICES else sympy.S.Zero
    return FittedScratch(sympy.sympify(size), Origin.RESERVED)


def _up(size: Any, multiple: int) -> sympy.Expr:
    if isinstance(size, int):
        return sympy.Integer(-(-size // multiple) * multiple)
    return multiple * sympy.ceiling(size / sympy.Integer(multiple))


_FORMULAS: dict[Any, Callable[..., FittedScratch]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
