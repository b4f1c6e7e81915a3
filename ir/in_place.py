"""Ops whose kernel may write its result over one of its operands.

The table lists kernels that read an element, or with the softmaxes a row, before they write it, and that
allocate nothing when they are given a place to write to: so the result is the same to the bit, and the
scratch is that of the op as it stands. Overloads with ``out=`` that torch generates from the op itself
allocate and copy; they are not in the table, and neither is anything random. Each entry is tested for bits
and bytes: that the names agree says nothing.

An operand may be overwritten if it is one whole block of memory in exactly the layout of the result, no other
operand refers to that block, and every operand of the result's shape has that layout: where layouts are
mixed, kernels may choose another one than tracing says, and those of the softmaxes write nonsense into a
given place. Whether anyone still needs it is for `passes.reuse` to say.

Sizes that are symbols are compared as expressions, so that asking notes no condition on them.

Not handled: ops with several results.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

_UNARY = (
    "abs clamp clamp_max clamp_min cos elu erf exp expm1 floor gelu hardsigmoid hardswish hardtanh "
    "leaky_relu log log1p neg reciprocal rsqrt sigmoid sign silu sin softplus sqrt tanh"
)
_BINARY = "maximum minimum _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data"
_BACKWARD = "elu gelu hardsigmoid hardtanh leaky_relu sigmoid silu softplus tanh threshold"
_WITH_PLACE = (
    {f"{name}.default": f"{name}.out" for name in f"{_UNARY} {_BINARY}".split()}
    | {f"{name}_backward.default": f"{name}_backward.grad_input" for name in _BACKWARD.split()}
    | {f"{name}.Tensor": f"{name}.out" for name in ("add", "sub", "mul", "div")}
    | {
        "div.Scalar": "div.out",
        "div.Tensor_mode": "div.out_mode",
        "mul.Scalar": "mul.out",  # `mul_.Scalar` rounds otherwise in bfloat16
        "pow.Tensor_Scalar": "pow.Tensor_Scalar_out",
        "pow.Tensor_Tensor": "pow.Tensor_Tensor_out",
        "where.self": "where.self_out",
    }
)
"""Op -> the same op with an argument for the place of the result; any operand may be that place."""
_OVER_FIRST = {
    "masked_fill.Scalar": "masked_fill_.Scalar",
    "masked_fill.Tensor": "masked_fill_.Tensor",
    "relu.default": "relu_.default",
}
"""Op -> the same op, which overwrites its first operand."""


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


TABLE: dict[Any, Any] = {
    _overload(name): _overload(form) for name, form in (_WITH_PLACE | _OVER_FIRST).items()
}
"""Op -> its form that overwrites an operand."""
_FORMS = frozenset(TABLE.values())


def _place(form: Any) -> str:
    """Name of the argument of a form that is only the place of the result; empty if it is an operand."""
    written = [a for a in form._schema.arguments if a.alias_info and a.alias_info.is_write]
    return str(written[0].name) if written[0].kwarg_only else ""


def overwritable(node: fx.Node) -> list[fx.Node]:
    """Operands in whose place the op's kernel may write its result."""
    form = TABLE.get(node.target)
    if form is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return []
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    blocks = [
        v.untyped_storage()._cdata for n in found if isinstance(v := n.meta["val"], torch.Tensor)
    ]
    if not _alike(node.meta["val"], [n.meta["val"] for n in found]):
        return []
    allowed = found if _place(form) else found[:1]
    return [n for n in allowed if _fits(n.meta["val"], node.meta["val"], blocks)]


def _alike(result: torch.Tensor, operands: list[Any]) -> bool:
    """Every operand of the result's shape is laid out like it."""
    return all(
        _numbers(v.stride()) == _numbers(result.stride())
        for v in operands
        if isinstance(v, torch.Tensor) and not _differ(v.shape, result.shape)
    )


def _numbers(sizes: Sequence[int | torch.SymInt]) -> list[Any]:
    return [n if isinstance(n, int) else n.node.expr for n in sizes]


def _differ(these: Sequence[int | torch.SymInt], those: Sequence[int | torch.SymInt]) -> bool:
    """The shapes differ, whatever the symbols are: none is 1, which a broadcast dimension is."""
    pairs = zip(_numbers(these), _numbers(those), strict=False)
    return len(these) != len(those) or any(
        a != b and (1 in (a, b) or (isinstance(a, int) and isinstance(b, int))) for a, b in pairs
    )


def _fits(operand: Any, result: torch.Tensor, blocks: list[int]) -> bool:
    """The operand is one whole block, no other operand's, and laid out like the result."""
    if not isinstance(operand, torch.Tensor):
        return False
    storage = operand.untyped_storage()
    whole, held = _numbers([operand.numel() * operand.itemsize, storage.nbytes()])
    return (
        blocks.count(storage._cdata) == 1
        and (operand.dtype, operand.device) == (result.dtype, result.device)
        and _numbers(operand.shape) == _numbers(result.shape)
        and _numbers(operand.stride()) == _numbers(result.stride())
        and _numbers([operand.storage_offset()]) == [0]
        and sympy.expand(whole - held) == 0
        and not (operand.is_conj() or operand.is_neg())
    )


def in_place(node: fx.Node, operand: Any) -> tuple[Any, dict[str, Any]]:
    """The form of an op that writes its result over an operand, and the keyword argument that says so.

    Args:
        node: the op as it stands.
        operand: what is passed for the operand.
    """
    form = TABLE[node.target]
    place = _place(form)
    return form, {place: operand} if place else {}


def overwritten(node: fx.Node) -> list[fx.Node]:
    """The operand that an op in such a form writes over."""
    if node.target not in _FORMS:
        return []
    place = _place(node.target)
    found: Any = node.kwargs[place] if place else node.args[0]
    return [found]
