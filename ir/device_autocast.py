"""Autocast of a CUDA device, for a trace on fake CPU tensors that is planned for one.

Inside `torch.autocast("cpu", dtype)` torch casts what the CPU's lists say. CUDA's lists differ: softmax,
the norms, exp, pow, sum and others run in float32 there and as they are here, and many ops that the CPU
runs in float32 are left alone there. Between entering and leaving `cuda_autocast()`, CUDA's lists hold.

Source: `AT_FORALL_*` and `CastPolicy` in aten/src/ATen/autocast_mode.h, and what autocast_mode.cpp
registers for the key `Autocast`, of torch 2.13; "CUDA Op-Specific Behavior" in the docs of `torch.amp`
describes them. An op is handled where the torch at hand has an autocast kernel for CUDA. Then
    on both devices      with policy LOWER or FP32, the CPU's kernel is CUDA's: it stays;
    on CUDA, otherwise   a kernel of this module stands in;
    on the CPU only      the op falls through, so that ops inside it are cast by their own policies.

The kernels are registered for the key `AutocastCPU` in a library that goes away on leaving. Kernels of
torch's Python dispatcher do not serve: an op without an autocast kernel in C++ is never asked for one.
So the lists change for the whole process, and for tensors with data, but nothing happens where autocast
is off. Weights are cast by torch's own `cached_cast`, so there is one cache, cleared when torch does it.

Not handled: tensors of the step that would stay on the CPU (CUDA's autocast does not cast them), and
the casts of cuDNN's recurrent networks (`_cudnn_rnn`), which are not traced on the CPU.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from ._torch import DisableAutocast, enable_python_dispatcher, ops_with_kernel, scoped_library
from .eager_kernels import python_kernels

aten = torch.ops.aten


class Policy(Enum):
    """What CUDA's autocast does before it runs an op; float64 and integers are never cast."""

    LOWER = auto()
    """Cast floating-point arguments to the type of autocast."""
    FP32 = auto()
    """Cast floating-point arguments to float32."""
    SET_DTYPE = auto()
    """Ask for a float32 result, unless the call names a type; arguments are not cast."""
    APPEND_DTYPE = auto()
    """Call the overload that takes a type, with float32."""
    PROMOTE = auto()
    """Cast floating-point arguments to float32 if one of them is, else to the type of autocast."""
    BANNED = auto()
    """Raise an error."""


_LISTS = {
    Policy.LOWER: """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm
        mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
        cudnn_convolution_transpose""",
    Policy.FP32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
        logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa""",
    Policy.SET_DTYPE: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    Policy.APPEND_DTYPE: "norm.Scalar norm.ScalarOpt_dim",
    Policy.PROMOTE: """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""",
    Policy.BANNED: "binary_cross_entropy",
}
CUDA_POLICIES: Mapping[str, Policy] = {
    f"aten::{name}": policy for policy, names in _LISTS.items() for name in names.split()
}
"""CUDA's autocast: name of an overload -> its policy."""

_Kernel = Callable[..., Any]
_NO_CAST = torch.empty(0, dtype=torch.int8)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let `torch.autocast("cpu", ...)` cast as CUDA's autocast does."""
    with scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that a kernel is overridden
            for name, kernel in _kernels().items():
                library.impl(name, kernel, "AutocastCPU")
        yield


@functools.cache
def _kernels() -> Mapping[str, _Kernel]:
    """What CUDA runs where the CPU's autocast runs something else."""
    cpu, cuda = (set(ops_with_kernel(f"Autocast{device}")) for device in ("CPU", "CUDA"))
    kernels: dict[str, _Kernel] = dict.fromkeys(cpu - cuda, torch.library.fallthrough_kernel)
    for name, policy in CUDA_POLICIES.items():
        shared = name in cpu and policy in (Policy.LOWER, Policy.FP32)
        if name in cuda and not shared:
            kernels[name] = _kernel(name, policy)
    return kernels


def _kernel(name: str, policy: Policy) -> _Kernel:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op: OpOverload = getattr(getattr(aten, packet), overload or "default")
    run = _APPENDED[name] if policy is Policy.APPEND_DTYPE else _RUN[policy]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with DisableAutocast():
            return run(op, *args, **kwargs)

    return kernel


def _lower(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _cast_and_run(op, _lower_type(), args, kwargs)


def _fp32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _cast_and_run(op, torch.float32, args, kwargs)


def _promote(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    wide = _lower_type()
    for tensor in filter(_eligible, _tensors([*args, *kwargs.values()])):
        if torch.float32 in (wide, tensor.dtype):
            wide = torch.float32
        elif tensor.dtype != wide:
            raise RuntimeError(f"Unexpected type in autocast of {op}: {tensor.dtype}, not {wide}")
    return _cast_and_run(op, wide, args, kwargs)


def _set_dtype(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    named = kwargs.get("dtype") is not None or args[position : position + 1] not in ((), (None,))
    if named or not _eligible(args[0]):
        return op(*args, **kwargs)
    return op(*args[:position], **{**kwargs, "dtype": torch.float32})


def _norm(op: OpOverload, x: Tensor, p: Any = 2) -> Any:
    return aten.norm.ScalarOpt_dtype(x, p, dtype=_wide(x))


def _norm_dim(op: OpOverload, x: Tensor, p: Any, dim: list[int], keepdim: bool = False) -> Any:
    return aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=_wide(x))


def _banned(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"CUDA's autocast refuses {op}, whose gradient may not fit a half type. "
        "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), without the sigmoid before it."
    )


_RUN: Mapping[Policy, _Kernel] = {
    Policy.LOWER: _lower,
    Policy.FP32: _fp32,
    Policy.SET_DTYPE: _set_dtype,
    Policy.PROMOTE: _promote,
    Policy.BANNED: _banned,
}
_APPENDED: Mapping[str, _Kernel] = {
    "aten::norm.Scalar": _norm,
    "aten::norm.ScalarOpt_dim": _norm_dim,
}


def _cast_and_run(
    op: OpOverload, dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    named = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return op(*(_cast(value, dtype) for value in args), **named)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(each, dtype) for each in value]
    if not isinstance(value, Tensor) or not _eligible(value) or value.dtype == dtype:
        return value
    return _cached_cast(value) if dtype == _lower_type() else value.to(dtype)


def _cached_cast(tensor: Tensor) -> Tensor:
    """The cast to the type of autocast, from its cache if `tensor` is a weight.

    Python cannot call torch's `cached_cast`. The autocast kernel of `mm` does, with each argument,
    before it calls `mm`, in whose place a function is put here that returns the first.
    """
    mm = aten.mm.default
    with enable_python_dispatcher(), python_kernels({mm: lambda cast, _: cast}):
        found: Tensor = mm._op_dk(DispatchKey.AutocastCPU, tensor, _NO_CAST)
    return found


def _eligible(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if _eligible(tensor) else tensor.dtype


def _lower_type() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
