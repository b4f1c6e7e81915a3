"""Taking tensors out of nested Python values, and putting others back in their place.

Handles tuples, lists, dicts and whatever else `torch.utils._pytree` knows, and beyond that any object
that keeps tensors in its ``__dict__`` (dataclasses, caches): it is rebuilt as a new object of its
class, without calling ``__init__``. Objects that hold no tensor are passed on as they are.

Does not handle: tensors in ``__slots__``, in closures, or in objects that refer to themselves.

No function here refers to itself through a closure: that would be a reference cycle, which keeps the
tensors alive until the next garbage collection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor was."""

    index: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object whose attributes hold tensors."""

    cls: type
    attributes: dict[str, Any]


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
    if isinstance(leaf, (*_PLAIN, type, torch.nn.Module)) or callable(leaf):
        return leaf
    attributes = getattr(leaf, "__dict__", None)
    if not attributes or id(leaf) in outer:
        return leaf
    before = len(tensors)
    take = partial(_take, tensors, (*outer, id(leaf)))
    inner = {name: _map(take, attribute) for name, attribute in attributes.items()}
    return _Object(type(leaf), inner) if len(tensors) > before else leaf


def put_tensors(pattern: object, tensors: Sequence[object]) -> Any:
    """Rebuild the value whose pattern `take_tensors` gave, with other leaves for its tensors."""
    return pytree.tree_map(partial(_put, tensors), pattern)


def _put(tensors: Sequence[object], leaf: object) -> object:
    if isinstance(leaf, Hole):
        return tensors[leaf.index]
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
