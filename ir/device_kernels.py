"""Kernels that a CUDA device runs, for a trace on fake CPU tensors that is planned for one.

A module without data can be planned for a machine that is not at hand. Its tensors then claim to be on
the CPU, and some composite ops would decompose as the CPU does it. Here they decompose as CUDA does:
    attention  `scaled_dot_product_attention` becomes the op that the rules of sdp_utils.cpp (in
               ATen/native/transformers/cuda) choose on devices from sm80 on: flash attention for half
               types without a mask, memory-efficient attention with a mask or in float32, the
               decomposition into matrix products for the rest.
    dropout    becomes `native_dropout`, which keeps a mask of one byte an element.
    softmax    of float16 with a float32 result reads the float16 input, without a float32 copy of it
               (SoftMax.cpp; likewise its logarithm).

Not modelled: the cuDNN attention that torch prefers on sm90 and sm100 (it keeps what flash keeps), limits
of single devices (heads wider than 192 with a gradient on sm86 and sm89), backends that the user has
switched off, cuDNN's batch norm and the workspaces of its convolutions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .eager_kernels import python_kernels

aten = torch.ops.aten

_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDEST = 256
_MASK_ALIGNMENT = 8
"""Elements; a mask whose rows are not a multiple of this is padded."""


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return torch.native_dropout(input, p, train)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _fits_flash(query, key, value, attn_mask, is_causal, enable_gqa):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _fits_efficient(query, key, value, attn_mask):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        found: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )[0]
        return found
    out: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _fits_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    grouped: bool,
) -> bool:
    widths = [x.shape[-1] for x in (query, key, value)]
    heads = [x.shape[1] for x in (query, key, value)] if query.dim() == 4 else []
    return (
        mask is None
        and _dense(query, key, value)
        and query.dtype in _FLASH_TYPES
        and widths[0] == widths[1] == widths[2] <= _FLASH_WIDEST
        and (grouped or heads[0] == heads[1] == heads[2])
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _fits_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    aligned = 8 if query.dtype in _FLASH_TYPES else 4  # elements that a load takes on tensor cores
    return (
        _dense(query, key, value)
        and query.dtype in (*_FLASH_TYPES, torch.float32)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[3] == key.shape[3]
        and all(x.shape[3] % aligned == 0 for x in (query, key, value))
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
    )


def _dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Four dimensions, one batch, one type, nothing empty, and rows without gaps."""
    tensors = (query, key, value)
    return all(
        x.dim() == 4
        and x.dtype == query.dtype
        and x.shape[0] == query.shape[0]
        and x.shape[2] > 0
        and (x.stride(3) == 1 or x.shape[3] == 1)
        for x in tensors
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Flash attention; heads are padded to a multiple of 8, as its wrapper does."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None and width % 8 else scale
    if width % 8:
        query, key, value = (aten.pad(x, (0, 8 - width % 8)) for x in (query, key, value))
    out: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out if out.shape[-1] == width else out[..., :width]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as memory-efficient attention takes it: added, aligned, with one row per query."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    last = mask.shape[-1]
    if last % _MASK_ALIGNMENT:
        mask = aten.pad(mask, (0, _MASK_ALIGNMENT - last % _MASK_ALIGNMENT))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _softmax(kernel: Callable[[Tensor, int, bool], Tensor]) -> Callable[..., Tensor]:
    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return kernel(input, dim, True)
        return kernel(input if dtype is None else input.to(dtype), dim, False)

    return softmax


_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.softmax.int: _softmax(aten._softmax),
    aten.log_softmax.int: _softmax(aten._log_softmax),
}


def cuda_kernels() -> AbstractContextManager[None]:
    """Trace the ops above as CUDA runs them; needs torch's Python dispatcher to be enabled."""
    return python_kernels(_KERNELS)
