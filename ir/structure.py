"""Taking tensors out of nested Python values, and putting others back in their place.

Handles tuples, lists, dicts and whatever else `torch.utils._pytree` knows, and beyond that any object
that keeps tensors in its ``__dict__`` (dataclasses, caches): it is rebuilt as a new object of its
class, without calling ``__init__``. Objects that hold no tensor are passed on as they are; the pattern
remembers what was in them, so that patterns of two calls differ if the object has changed between them.
Modules, functions, classes and enumerations are compared as themselves.

Does not handle: tensors in ``__slots__``, in containers of unknown classes, in closures (`held_tensor`
finds those), or in objects that refer to themselves; changes inside objects without a ``__dict__``
that are no set, list or dict.

No function here refers to itself through a closure: that would be a reference cycle, which keeps the
tensors alive until the next garbage collection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_THEMSELVES = (*_PLAIN, type, Enum, ModuleType, torch.nn.Module)


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor was."""

    index: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object whose attributes hold tensors."""

    cls: type
    attributes: dict[str, Any] = field(compare=False)
    contents: object
    """`_typed` attributes."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An object that holds no tensor: passed on as it is, compared by what was in it."""

    value: object = field(compare=False)
    cls: type
    contents: object


def loss_of(output: object) -> torch.Tensor | None:
    """The scalar that an output calls its loss, by attribute or key; None if there is none."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.dim() == 0 and named.requires_grad:
        return named
    return None


def take_tensors(value: object) -> tuple[list[torch.Tensor], object]:
    """Split `value` into its tensors, in order, and a pattern for `put_tensors`.

    A tensor that occurs twice is taken once.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _map(partial(_take, tensors, ()), value)


def _map(change: Callable[[object], object], value: object) -> object:
    """`pytree.tree_map`, quick for plain containers: calls are taken apart at every step."""
    if type(value) is tuple:
        return tuple([_map(change, item) for item in value])
    if type(value) is list:
        return [_map(change, item) for item in value]
    if type(value) is dict:
        return {key: _map(change, item) for key, item in value.items()}
    if isinstance(value, (torch.Tensor, *_PLAIN)) and type(value) is not torch.Size:
        return change(value)
    return pytree.tree_map(change, value)


def _take(tensors: list[torch.Tensor], outer: tuple[int, ...], leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        known = next((i for i, tensor in enumerate(tensors) if tensor is leaf), len(tensors))
        if known == len(tensors):
            tensors.append(leaf)
        return Hole(known)
    if isinstance(leaf, _THEMSELVES) or callable(leaf) or id(leaf) in outer:
        return leaf
    take = partial(_take, tensors, (*outer, id(leaf)))
    attributes = getattr(leaf, "__dict__", None)
    if attributes:
        before = len(tensors)
        inner = {name: _map(take, attribute) for name, attribute in attributes.items()}
        contents = _map(_typed, inner)
        if len(tensors) > before:
            return _Object(type(leaf), inner, contents)
        return _Kept(leaf, type(leaf), (contents, _elements(leaf)))
    elements = _elements(leaf)
    return leaf if elements is None else _Kept(leaf, type(leaf), elements)


def _typed(leaf: object) -> object:
    """A plain value with its type: 1, 1.0 and True are equal, and compute different things."""
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else leaf


def _elements(leaf: object) -> object:
    """Shallow copy of what a container holds that pytree does not know; None if it is none."""
    if isinstance(leaf, dict):
        return {key: _typed(value) for key, value in leaf.items()}
    if isinstance(leaf, list):
        return [_typed(value) for value in leaf]
    return set(leaf) if isinstance(leaf, set | frozenset) else None


def held_tensor(value: object, traced: bool) -> str:
    """Name of the class that hides a tensor inside `value`, a pattern; empty if none does.

    Looks into lists, tuples, sets, dicts, attributes, ``__slots__`` and closures; not into modules.

    Args:
        value: the pattern.
        traced: only tensors of a trace count; else all, except those that callables hold.
    """
    return _held(value, traced, "", set())


def _held(value: object, traced: bool, holder: str, seen: set[int]) -> str:
    if isinstance(value, torch.Tensor):
        real = type(value) in (torch.Tensor, torch.nn.Parameter)
        return "" if traced and real else holder or "container"
    themselves = isinstance(value, _THEMSELVES) or (not traced and callable(value))
    if themselves or id(value) in seen:
        return ""
    seen.add(id(value))
    ours = isinstance(value, _Object | _Kept) or type(value) in (tuple, list, dict)
    holder = holder if ours else type(value).__name__
    return next((found for v in _inside(value) if (found := _held(v, traced, holder, seen))), "")


def _inside(value: object) -> list[Any]:
    if isinstance(value, _Object):
        return list(value.attributes.values())
    if isinstance(value, _Kept):
        return [value.value]
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return [cell.cell_contents for cell in cells]
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        inside += value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        inside += value
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        inside += [getattr(value, n) for n in names if n != "__dict__" and hasattr(value, n)]
    return inside


def put_tensors(pattern: object, tensors: Sequence[object]) -> Any:
    """Rebuild the value whose pattern `take_tensors` gave, with other leaves for its tensors."""
    return pytree.tree_map(partial(_put, tensors), pattern)


def _put(tensors: Sequence[object], leaf: object) -> object:
    if isinstance(leaf, Hole):
        return tensors[leaf.index]
    if isinstance(leaf, _Kept):
        return leaf.value
    if isinstance(leaf, _Object):
        instance: Any = object.__new__(leaf.cls)
        put = partial(_put, tensors)
        for name, value in leaf.attributes.items():
            instance.__dict__[name] = pytree.tree_map(put, value)
        return instance
    return leaf


def rebuilder(pattern: object) -> Callable[[Sequence[object]], Any]:
    """`put_tensors` for one pattern, with the pattern flattened once instead of at every call."""
    leaves, spec = pytree.tree_flatten(pattern)

    def rebuild(tensors: Sequence[object]) -> Any:
        return pytree.tree_unflatten([_put(tensors, leaf) for leaf in leaves], spec)

    return rebuild
