"""Calls of ops as plain data, and real arguments for them.

A *call* is an op with its arguments. `described` replaces every tensor of a call by its metadata, so
that a trace can keep calls without keeping storages alive; `at` puts integers where sizes are
symbolic; `realized` makes tensors again, on any device. Tensors of one call that share a storage
share it again. Floating-point tensors are filled with ones, all others with zeros: zero is valid as
an index, an offset or a class, and one as a probability or a divisor.

Not described: sparse and nested tensors, tensor subclasses other than fake tensors, and the lazy
conjugate and negative bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.node import map_aggregate

from .memory import at_binding

Size: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One execution of an op."""

    target: Callable[..., Any]
    """The op, e.g. ``torch.ops.aten.mm.default``."""
    args: tuple[Any, ...]
    """Positional arguments; tensors are real, fake, on `meta`, or a `TensorSpec`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments, likewise."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of a tensor in a call."""

    shape: tuple[Size, ...]
    """Elements in each dimension."""
    strides: tuple[Size, ...]
    """Elements between neighbours in each dimension."""
    offset: Size
    """Elements of the storage before the first one."""
    dtype: torch.dtype
    device: torch.device
    storage: int
    """Number of its storage, counted in the order of first occurrence in the call."""
    storage_bytes: Size
    """Size of its storage."""


def described(call: Call) -> Call:
    """The same call, with metadata in place of tensors and sympy in place of symbolic numbers."""
    storages: list[torch.UntypedStorage | int] = []

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _size(leaf)
        if isinstance(leaf, torch.Generator):
            return torch.Generator(leaf.device)
        if isinstance(leaf, TensorSpec):
            storages.append(leaf.storage)
            return leaf
        return _spec(leaf, storages) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = _mapped(call, describe)
    return Call(call.target, args, kwargs)


def at(call: Call, binding: Mapping[sympy.Symbol, int]) -> Call:
    """A described call at a binding of its symbols.

    Raises:
        TypeError: if a symbol is not bound.
    """

    def number(size: Size) -> int:
        return at_binding(size, binding)

    def bind(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return TensorSpec(
                tuple(map(number, leaf.shape)),
                tuple(map(number, leaf.strides)),
                number(leaf.offset),
                leaf.dtype,
                leaf.device,
                leaf.storage,
                number(leaf.storage_bytes),
            )
        if isinstance(leaf, sympy.Expr):
            value = leaf.subs(binding)
            return int(value) if value.is_integer else float(value)
        return leaf

    args, kwargs = _mapped(call, bind)
    return Call(call.target, args, kwargs)


def renamed(call: Call, rename: Callable[[Any], Any]) -> Call:
    """A described call with every symbolic size replaced by what `rename` makes of it."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return replace(
                leaf,
                shape=tuple(map(rename, leaf.shape)),
                strides=tuple(map(rename, leaf.strides)),
                offset=rename(leaf.offset),
                storage_bytes=rename(leaf.storage_bytes),
            )
        return rename(leaf)

    args, kwargs = _mapped(call, change)
    return Call(call.target, args, kwargs)


def realized(call: Call, device: torch.device) -> Call:
    """A described call without symbols, on newly made tensors on `device`."""
    storages: dict[int, torch.UntypedStorage] = {}

    def realize(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, TensorSpec):
            return leaf
        if leaf.storage not in storages:
            fill = torch.ones if leaf.dtype.is_floating_point else torch.zeros
            length = -(-int(leaf.storage_bytes) // leaf.dtype.itemsize)
            flat = fill(length, dtype=leaf.dtype, device=device)
            storages[leaf.storage] = flat.untyped_storage()
        empty = torch.empty(0, dtype=leaf.dtype, device=device)
        return empty.set_(storages[leaf.storage], leaf.offset, leaf.shape, leaf.strides)

    args, kwargs = _mapped(call, realize)
    return Call(call.target, args, kwargs)


def leaves(value: Any) -> tuple[Any, ...]:
    """Every leaf of arguments or of an op's result, in order."""
    if isinstance(value, list | tuple):
        return tuple(leaf for item in value for leaf in leaves(item))
    if isinstance(value, Mapping):
        return leaves(tuple(value.values()))
    return (value,)


def specs(call: Call) -> tuple[TensorSpec, ...]:
    """The tensors of a described call, in order."""
    return tuple(x for x in leaves((call.args, call.kwargs)) if isinstance(x, TensorSpec))


def tensors_of(call: Call) -> tuple[torch.Tensor, ...]:
    """The tensors of a call that is not described, in order."""
    return tuple(x for x in leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor))


def call_device(call: Call) -> torch.device:
    """Device on which a described call executes: the first that it names other than the CPU."""
    named = (
        leaf.device if isinstance(leaf, TensorSpec) else leaf
        for leaf in leaves((call.args, call.kwargs))
    )
    others = (x for x in named if isinstance(x, torch.device) and x.type not in ("cpu", "meta"))
    return next(others, torch.device("cpu"))


def call_key(call: Call) -> tuple[Any, ...]:
    """Equal for two described calls exactly if op and arguments are.

    ``1``, ``1.0`` and ``True`` differ.
    """
    return (call.target, _typed(call.args), _typed(dict(call.kwargs)))


def flat_tensors(result: Any) -> tuple[torch.Tensor | None, ...]:
    """Every leaf of an op's result, in order; None for one that is no tensor."""
    return tuple(x if isinstance(x, torch.Tensor) else None for x in leaves(result))


def _mapped(call: Call, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with `change` applied to every leaf."""
    args: Any = map_aggregate(call.args, change)
    kwargs = {name: map_aggregate(value, change) for name, value in call.kwargs.items()}
    return args, kwargs


def _typed(value: Any) -> Any:
    """Hashable form of an argument."""
    if isinstance(value, list | tuple):
        return tuple(_typed(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _typed(item)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return (slice, _typed((value.start, value.stop, value.step)))
    return value if isinstance(value, TensorSpec) else (type(value), value)


def _size(size: Any) -> Size:
    """A size of a possibly symbolic tensor."""
    return size if isinstance(size, int | float | bool) else size.node.expr


def _spec(tensor: torch.Tensor, storages: list[Any]) -> TensorSpec:
    """Metadata of `tensor`; its storage is numbered by its place in `storages`, and added there."""
    storage = tensor.untyped_storage()
    number = next((i for i, other in enumerate(storages) if other is storage), len(storages))
    if number == len(storages):
        storages.append(storage)
    return TensorSpec(
        tuple(map(_size, tensor.shape)),
        tuple(map(_size, tensor.stride())),
        _size(tensor.storage_offset()),
        tensor.dtype,
        torch.device("cpu") if tensor.device.type == "meta" else tensor.device,
        number,
        _size(storage.nbytes()),
    )
