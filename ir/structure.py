"""Taking tensors out of nested Python values, and putting others back in their place.

Handles tuples, lists, dicts and whatever else `torch.utils._pytree` knows, and beyond that any object
that keeps tensors in its ``__dict__`` (dataclasses, caches): it is rebuilt as a new object of its
class, without calling ``__init__``. Objects that hold no tensor are passed on as they are.

Does not handle: tensors in ``__slots__``, in closures, or in objects that refer to themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class _Hole:
    """Where a tensor was."""

    index: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object whose attributes hold tensors."""

    cls: type
    attributes: dict[str, Any]


def take_tensors(value: object) -> tuple[list[torch.Tensor], object]:
    """Split `value` into its tensors, in order, and a pattern for `put_tensors`."""
    tensors: list[torch.Tensor] = []

    def visit(leaf: object, outer: tuple[int, ...]) -> object:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return _Hole(len(tensors) - 1)
        if isinstance(leaf, _PLAIN) or isinstance(leaf, (type, torch.nn.Module)) or callable(leaf):
            return leaf
        attributes = getattr(leaf, "__dict__", None)
        if not attributes or id(leaf) in outer:
            return leaf
        before = len(tensors)
        inner = {
            name: pytree.tree_map(lambda x: visit(x, (*outer, id(leaf))), attribute)
            for name, attribute in attributes.items()
        }
        return _Object(type(leaf), inner) if len(tensors) > before else leaf

    pattern = pytree.tree_map(lambda leaf: visit(leaf, ()), value)
    return tensors, pattern


def put_tensors(pattern: object, tensors: Sequence[object]) -> Any:
    """Rebuild the value whose pattern `take_tensors` gave, with other leaves for its tensors."""

    def fill(leaf: object) -> object:
        if isinstance(leaf, _Hole):
            return tensors[leaf.index]
        if isinstance(leaf, _Object):
            instance = object.__new__(leaf.cls)
            instance.__dict__.update(
                {name: pytree.tree_map(fill, value) for name, value in leaf.attributes.items()}
            )
            return instance
        return leaf

    return pytree.tree_map(fill, pattern)


def rebuilder(pattern: object) -> Callable[[Sequence[object]], Any]:
    """`put_tensors` for one pattern, with the pattern flattened once instead of at every call."""
    leaves, spec = pytree.tree_flatten(pattern)
    if any(isinstance(leaf, _Object) for leaf in leaves):
        return lambda tensors: put_tensors(pattern, tensors)
    slots = [(i, leaf.index) for i, leaf in enumerate(leaves) if isinstance(leaf, _Hole)]

    def rebuild(tensors: Sequence[object]) -> Any:
        filled = list(leaves)
        for i, index in slots:
            filled[i] = tensors[index]
        return pytree.tree_unflatten(filled, spec)

    return rebuild
