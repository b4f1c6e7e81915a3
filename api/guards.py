"""Guards: under which conditions a plan is valid, and why a call is outside them.

A plan holds for: the same arguments (sizes, strides, types, device, need of a gradient; equal values of
what is no tensor), the same parameters and buffers (object, type, device, need of a gradient), every
submodule in the same mode, the same autocast state. The check runs at every call, so it only compares
what was looked up once.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.ir.structure import take_tensors

_DEVICES = ("cpu", "cuda")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def normalize(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The same call whether arguments come by position or keyword, and without those left at default."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the forward itself raises the better error
        return args, kwargs
    for name, parameter in signature.parameters.items():
        if name in bound.arguments and bound.arguments[name] is parameter.default:
            del bound.arguments[name]
    return bound.args, bound.kwargs


def _of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a parameter or buffer is registered, and what it was when the plan was made."""

    name: str
    holder: dict[str, Any]
    key: str
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Guard:
    """Conditions under which one plan is valid."""

    pattern: object
    arguments: tuple[tuple[Any, ...], ...]
    slots: tuple[_Slot, ...]
    """Parameters then buffers, in the order of the graph's inputs."""
    trained: tuple[_Slot, ...]
    modes: tuple[tuple[nn.Module, bool], ...]
    autocast: tuple[Any, ...]

    def why_not(self, tensors: list[torch.Tensor], pattern: object) -> str:
        """Why a call is outside the guard; empty if it is inside."""
        if pattern != self.pattern:
            return "other arguments, or other values of arguments that are no tensors"
        for i, (tensor, expected) in enumerate(zip(tensors, self.arguments, strict=True)):
            if _of(tensor) != expected:
                return (
                    f"tensor argument {i} is {_text(_of(tensor))}, planned for {_text(expected)}"
                )
        for module, training in self.modes:
            if module.training is not training:
                return f"a {type(module).__name__} is in {'train' if module.training else 'eval'} mode"
        for slot in self.slots:
            held = slot.holder.get(slot.key)
            if (
                held is None
                or held.dtype is not slot.dtype
                or held.requires_grad is not slot.requires_grad
                or held.device != slot.device
                or held.shape != slot.shape
            ):
                return f"{slot.name} has changed type, device, shape or requires_grad"
        if _autocast() != self.autocast:
            return "autocast is on or off, unlike when it was planned"
        return ""

    def primals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of the graph, in order."""
        return [slot.holder[slot.key] for slot in self.slots] + tensors

    def trained_ids(self) -> frozenset[int]:
        """`id` of every trained parameter."""
        return frozenset(id(slot.holder[slot.key]) for slot in self.trained)

    def has_gradients(self) -> bool:
        """Some trained parameter has a `.grad`."""
        return any(slot.holder[slot.key].grad is not None for slot in self.trained)


def _text(described: tuple[Any, ...]) -> str:
    shape, _, dtype, device, requires_grad = described
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}" + (
        ", requires grad" if requires_grad else ""
    )


def make_guard(
    module: nn.Module, call: Call, parameters: tuple[str, ...], buffers: tuple[str, ...]
) -> Guard:
    """The guard of a plan that is made now, for this call.

    Args:
        module: the drop-in.
        call: its normalised arguments.
        parameters: names of the graph's parameter inputs.
        buffers: names of its buffer inputs.
    """
    tensors, pattern = take_tensors(call)
    slots = tuple(_slot(module, name, "_parameters") for name in parameters)
    return Guard(
        pattern,
        tuple(_of(tensor) for tensor in tensors),
        slots + tuple(_slot(module, name, "_buffers") for name in buffers),
        tuple(slot for slot in slots if slot.requires_grad),
        tuple((child, child.training) for child in module.modules()),
        _autocast(),
    )


def _slot(module: nn.Module, name: str, kind: str) -> _Slot:
    path, _, key = name.rpartition(".")
    holder: dict[str, Any] = vars(module.get_submodule(path))[kind]
    tensor = holder[key]
    return _Slot(
        name, holder, key, tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape
    )
