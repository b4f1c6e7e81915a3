"""Guards: under which conditions a plan is valid, and why a call is outside them.

A plan holds for: the same arguments (sizes, strides, types, device, need of a gradient; equal values of
what is no tensor), the same parameters and buffers (type, device, sizes, strides, need of a gradient),
the same state of all modules (see `module_state`), the same autocast state. The check runs at every call,
so it only compares what was looked up once; torch's own guards, in C++, compare parameters and buffers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from remat.ir import UnsupportedGraphError
from remat.ir._torch import tensor_check
from remat.ir.autocast import autocast_dtypes
from remat.ir.structure import take_tensors

from .module_state import ModuleState, module_state
from .outside import Outside, Remedy
from .program import Interface

_PLAIN = (bool, int, float, str)
Call = tuple[tuple[Any, ...], dict[str, Any]]
State = list[torch.Tensor]
"""Parameters, then buffers."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parameters of a forward; calls are brought into one form by them, at every step."""

    signature: inspect.Signature
    positional: tuple[str, ...]
    """Those that may come by position."""
    defaults: Mapping[str, object]
    """Of all that have a name, in order; `Parameter.empty` where there is none."""
    plain: bool
    """There is neither ``*args`` nor a parameter without a name."""
    more: bool
    """There is ``**kwargs``."""

    def normalize(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The same call whether arguments come by position or keyword, and without those left at default.

        None if the arguments do not fit the signature.
        """
        if not self.plain:
            return _bound(self.signature, args, kwargs)
        given = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional) or not given.keys().isdisjoint(kwargs):
            return None
        given.update(kwargs)
        ordered: dict[str, Any] = {}
        for name, default in self.defaults.items():
            if name in given:
                value = given.pop(name)
                if not _is(value, default):
                    ordered[name] = value
            elif default is inspect.Parameter.empty:
                return None
        if given and not self.more:
            return None
        leading: list[Any] = []
        for name in self.positional:
            if name not in ordered:
                break
            leading.append(ordered.pop(name))
        return tuple(leading), {**ordered, **given}


def arguments_of(signature: inspect.Signature) -> Arguments:
    """The parameters of a forward, from its signature."""
    every = signature.parameters.values()
    named = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Arguments(
        signature,
        tuple(p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD),
        {p.name: p.default for p in named},
        not any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in every),
        any(p.kind is p.VAR_KEYWORD for p in every),
    )


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """The same for any signature, slower."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    given, parameters = bound.arguments, signature.parameters
    if any(p.kind is p.VAR_POSITIONAL and given.get(n) for n, p in parameters.items()):
        return bound.args, bound.kwargs  # what stands before *args cannot be left out
    for name, value in list(given.items()):
        parameter = parameters[name]
        if parameter.kind is not parameter.POSITIONAL_ONLY and _is(value, parameter.default):
            del given[name]
    return bound.args, bound.kwargs


def _is(value: object, default: object) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, _PLAIN) and value == default
    )


def _equal(these: object, those: object) -> bool:
    """Equal types and values; what cannot be compared is not equal."""
    if type(these) is not type(those):
        return False
    if isinstance(these, tuple | list):
        assert isinstance(those, tuple | list)
        return len(these) == len(those) and all(map(_equal, these, those))
    if isinstance(these, dict):
        assert isinstance(those, dict)
        return these.keys() == those.keys() and all(_equal(v, those[k]) for k, v in these.items())
    try:
        return bool(these == those)
    except Exception:  # arrays, and whatever else users compare in their own way
        return False


def described(tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What a plan depends on, of each tensor argument of a call."""
    return tuple(map(_of, tensors))


def _like(now: tuple[Any, ...], was: tuple[Any, ...], dims: frozenset[int]) -> bool:
    """The same but for the sizes of some dimensions, and then the strides."""
    if not dims or now[2:] != was[2:] or len(now[0]) != len(was[0]):
        return False
    sizes = enumerate(zip(now[0], was[0], strict=True))
    return all(a == b or dim in dims for dim, (a, b) in sizes)


def _of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _text(described: tuple[Any, ...]) -> str:
    shape, _, dtype, device, requires_grad = described
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}" + (
        ", requires grad" if requires_grad else ""
    )


@dataclass(frozen=True, slots=True)
class Guard:
    """Conditions under which one plan is valid."""

    pattern: object
    arguments: tuple[tuple[Any, ...], ...]
    dynamic: tuple[frozenset[int], ...]
    """Per tensor argument: dimensions whose size may differ. Which plan holds at a size is looked up."""
    names: tuple[str, ...]
    """Parameters then buffers, in the order of the graph's inputs."""
    places: tuple[tuple[Mapping[str, Any], str], ...]
    """Where each of them is registered."""
    were: tuple[tuple[Any, ...], ...]
    """What each of them was when the plan was made."""
    alike: Callable[..., bool]
    """Whether others in their places are like they were."""
    needs: tuple[bool, ...]
    """Whether each of them requires a gradient."""
    state: ModuleState
    """What the modules hold in Python."""
    autocast: tuple[Any, ...]
    updates: bool
    """The step updates an argument in place."""
    updates_state: bool
    """The step updates a buffer or an argument in place."""

    def check(self, tensors: list[torch.Tensor], pattern: object) -> Outside | State:
        """Parameters and buffers as they are now, for a call inside the guard; else why it is outside."""
        if not _equal(pattern, self.pattern):
            return Outside("other arguments, or other values of arguments that are no tensors")
        if found := self._other_arguments(tensors):
            return found
        if change := self.state.change():
            return change
        if autocast_dtypes() != self.autocast:
            return Outside("autocast is on or off, unlike when it was planned", Remedy.PLAN)
        try:
            state = [holder[key] for holder, key in self.places]
        except KeyError as error:
            return Outside(f"parameter or buffer {error} has been removed")
        if not self.alike(*state) and (found := self._other_state(state)):
            return found
        if self.updates and _share_memory(tensors):
            return Outside(SHARED)
        if self.updates_state and _share_state(tensors, state):
            return Outside(
                "an argument shares memory with a parameter or buffer, and the step updates some"
            )
        return state

    def _other_arguments(self, tensors: list[torch.Tensor]) -> Outside | None:
        differ: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []
        for i, (tensor, expected) in enumerate(zip(tensors, self.arguments, strict=True)):
            if (now := _of(tensor)) != expected and not _like(now, expected, self.dynamic[i]):
                differ.append((i, now, expected))
        if not differ:
            return None
        i, now, expected = differ[0]
        sizes = all(is_[2:] == was[2:] and len(is_[0]) == len(was[0]) for _, is_, was in differ)
        other = any(is_[0] != was[0] for _, is_, was in differ)
        return Outside(
            f"tensor argument {i} is {_text(now)}, planned for {_text(expected)}",
            Remedy.SIZES if sizes and other else Remedy.PLAN,
        )

    def _other_state(self, state: Sequence[object]) -> Outside | None:
        for name, tensor, was in zip(self.names, state, self.were, strict=True):
            if tensor is None:
                return Outside(f"{name} has been removed")
            if type(tensor) not in (nn.Parameter, torch.Tensor):
                return Outside(f"{name} has become a {type(tensor).__name__}, a tensor subclass")
            assert isinstance(tensor, torch.Tensor)
            if (now := _of(tensor)) != was:
                if now[:-1] == was[:-1]:
                    return Outside(f"{name} has been frozen, or is trained again", Remedy.PLAN)
                why = f"{name} is {_text(now)}, planned for {_text(was)}"
                return Outside(why, Remedy.PLAN)
        return None  # a mode is on or off that plans take no part in

    def conditions(self) -> int:
        """How many things are compared at every call."""
        return len(self.arguments) + len(self.places) + self.state.conditions()

    def primals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of the graph, in order."""
        return [holder[key] for holder, key in self.places] + tensors

    def trained(self) -> list[torch.Tensor]:
        """Parameters that require a gradient."""
        return self._trained([holder[key] for holder, key in self.places])

    def has_gradients(self, state: State) -> bool:
        """Some trained parameter has a `.grad`.

        Args:
            state: parameters and buffers as they are now.
        """
        gradients = [parameter.grad for parameter in self._trained(state)]
        return gradients.count(None) < len(gradients)

    def _trained(self, state: State) -> list[torch.Tensor]:
        return list(compress(state, self.needs))


SHARED = "arguments share memory, and the step updates an argument in place"


def _share_memory(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


def _share_state(tensors: list[torch.Tensor], state: State) -> bool:
    arguments = {tensor.untyped_storage()._cdata for tensor in tensors}
    return any(tensor.untyped_storage()._cdata in arguments for tensor in state)


def make_guard(
    module: nn.Module, call: Call, interface: Interface, dynamic: tuple[frozenset[int], ...]
) -> Guard:
    """The guard of a plan that is made now, for this call.

    Args:
        module: the drop-in.
        call: its normalised arguments.
        interface: of the plan.
        dynamic: per tensor argument, dimensions whose size may differ.

    Raises:
        UnsupportedGraphError: it does, and the arguments share memory.
    """
    tensors, pattern = take_tensors(call)
    if interface.updates_arguments and _share_memory(tensors):
        raise UnsupportedGraphError(f"{SHARED}, so the others change too. Pass copies instead.")
    parameters, buffers = interface.parameters, interface.buffers
    places = [_place(module, name, "_parameters") for name in parameters]
    places += [_place(module, name, "_buffers") for name in buffers]
    state = [holder[key] for holder, key in places]
    return Guard(
        pattern=pattern,
        arguments=described(tensors),
        dynamic=dynamic,
        names=(*parameters, *buffers),
        places=tuple(places),
        were=tuple(map(_of, state)),
        alike=tensor_check(state),
        needs=tuple(tensor.requires_grad for tensor in state),
        state=module_state(module),
        autocast=autocast_dtypes(),
        updates=interface.updates_arguments,
        updates_state=interface.updates_state,
    )


def _place(module: nn.Module, name: str, kind: str) -> tuple[Mapping[str, Any], str]:
    path, _, key = name.rpartition(".")
    return vars(module.get_submodule(path))[kind], key
