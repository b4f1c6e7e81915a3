"""What a drop-in is to the rest of Python: a `GraphModule` that is an instance of the user's class.

It shares the model's parameters, buffers and submodules: the very dictionaries, so that what is added
to one is seen by the other. It is pickled as the user's own class, and a deep copy is a drop-in of its
own, which makes its own plan.

Or the model itself becomes the drop-in (`become_dropin`), for those who hold it already: it changes its
class, and nothing else of it moves.
"""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from remat.ir import UnsupportedGraphError

from .beside import MODELS
from .compiling import note_capture
from .dropin import Remat
from .options import Options

_TAKEN = ("code", "graph", "meta", "remat")
_PATCHED = "_remat_forward"
"""Attribute that keeps a forward that was put on the model itself."""


def make_dropin(model: nn.Module, options: Options) -> nn.Module:
    """An object of a subclass of the model's class that shares the model's state.

    Args:
        model: the model; a drop-in gives another drop-in for the model that it was made of.
        options: for its plans.

    Raises:
        UnsupportedGraphError: the model has attributes of its own by the names that the drop-in needs.
    """
    base = _checked_base(model)
    instance: Any = object.__new__(_class_for(base))  # type: ignore[arg-type]
    vars(instance).update(_state(model))
    patched = vars(instance).pop("forward", None)
    if patched is not None:
        vars(instance)[_PATCHED] = _rebound(patched, model, instance)
    _attach(instance, options)
    assert isinstance(instance, nn.Module)
    return instance


def _attach(instance: nn.Module, options: Options) -> None:
    """Give a drop-in its `remat`, without a plan."""
    remat = vars(instance)["remat"] = Remat(options, inspect.signature(_original(instance)))
    remat.owner = weakref.ref(instance)
    MODELS.add(instance)


@contextlib.contextmanager
def become_dropin(model: nn.Module, options: Options) -> Iterator[None]:
    """Make the model itself a drop-in; what is raised inside leaves it as it was.

    A drop-in begins anew, with these options and no plan.

    Args:
        model: of any class.
        options: for its plans.

    Raises:
        UnsupportedGraphError: attributes clash; see `make_dropin`.
    """
    base, before = _checked_base(model), vars(model).get("remat")
    try:
        _swap(model, base)
        _attach(model, options)
        yield
    except BaseException:
        restore(model)
        if before is not None:
            _swap(model, base)
            vars(model)["remat"] = before
        raise


def _swap(model: nn.Module, base: type[nn.Module]) -> None:
    """Change the class of a model to that of its drop-ins."""
    model.__class__ = _class_for(base)  # type: ignore[arg-type]
    if "forward" in vars(model):
        vars(model)[_PATCHED] = vars(model).pop("forward")


def restore(model: nn.Module) -> None:
    """Undo `become_dropin`: the model is of its own class again, and nothing of ours is left on it."""
    patched = vars(model).get(_PATCHED)
    model.__class__ = getattr(type(model), "_remat_base", type(model))
    for name in ("remat", "_remat_meta", _PATCHED):
        vars(model).pop(name, None)
    if patched is not None:
        vars(model)["forward"] = patched


def _checked_base(model: nn.Module) -> type[nn.Module]:
    """The user's class of a model or drop-in, if a drop-in for it is possible."""
    base: type[nn.Module] = getattr(type(model), "_remat_base", type(model))
    if base is type(model):
        clash = [name for name in _TAKEN if hasattr(base, name) or name in vars(model)]
        if clash:
            raise UnsupportedGraphError(
                f"{base.__name__} has attributes {clash}, which the optimised model needs for itself. "
                "Rename them, or wrap the model in a module without them."
            )
    return base


def _rebound(forward: Callable[..., Any], model: nn.Module, instance: nn.Module) -> Any:
    """A forward that was put on `model`, for `instance`."""
    mine = isinstance(forward, MethodType) and forward.__self__ is model
    return MethodType(forward.__func__, instance) if mine else forward  # type: ignore[attr-defined]


def _original(model: nn.Module) -> Callable[..., Any]:
    """The model's own forward, bound: the one put on the instance, else the class's."""
    patched: Callable[..., Any] | None = vars(model).get(_PATCHED)
    return patched or functools.partial(type(model)._remat_base.forward, model)  # type: ignore[attr-defined]


@functools.cache
def _class_for(base: type[nn.Module]) -> type:
    """The class of a drop-in: the user's, and `GraphModule`, with forward on top."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        remat: Remat = vars(self)["remat"]
        bound = _original(self)
        planned = self.training and torch.is_grad_enabled() and remat.enabled
        if not planned:
            return bound(*args, **kwargs)
        if torch.compiler.is_compiling():
            note_capture(remat)
            return bound(*args, **kwargs)
        return remat.call(self, bound, args, kwargs)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__str__": base.__repr__,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "_graph": property(_graph),
        "graph": property(_graph),
        "code": property(lambda self: _graph(self).python_code("self").src),
        "meta": property(lambda self: vars(self).setdefault("_remat_meta", {})),
        "recompile": lambda self: None,
        "forward": forward,
        "_remat_base": base,
        "_remat_original": property(_original),
    }
    return type(base.__name__, (base, fx.GraphModule), namespace)


def _graph(model: nn.Module) -> fx.Graph:
    planned = vars(model)["remat"].forward_graph
    if planned is not None:
        return planned.graph  # type: ignore[no-any-return]
    empty = fx.Graph()
    empty.output(None)
    return empty


def _state(model: nn.Module) -> dict[str, Any]:
    """Attributes of the user's own object."""
    state = {k: v for k, v in vars(model).items() if k not in ("remat", "_remat_meta", _PATCHED)}
    if _PATCHED in vars(model):
        state["forward"] = vars(model)[_PATCHED]
    return state


def _plain(model: nn.Module) -> nn.Module:
    """An object of the user's own class with the same attributes: it is copied and pickled as they say."""
    plain: nn.Module = object.__new__(type(model)._remat_base)  # type: ignore[attr-defined]
    vars(plain).update(_state(model))
    return plain


def _reduce(model: nn.Module, protocol: int) -> Any:
    """Pickle as the user's own class, so that a checkpoint loads where remat is not installed."""
    plain = _plain(model)
    reduced: Any = plain.__reduce_ex__(protocol)
    new, given = reduced[:2]
    if new.__name__ in ("__newobj__", "__newobj_ex__"):  # which want an object of that very class
        reduced = (functools.partial(new, *given), (), *reduced[2:])
    return reduced


def _copy(model: nn.Module) -> nn.Module:
    """Another drop-in that shares the model's state."""
    return make_dropin(model, vars(model)["remat"].options)


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A drop-in for a copy of the model; it makes its own plan when it trains."""
    instance: Any = object.__new__(type(model))
    memo[id(model)] = instance
    vars(instance).update(vars(copy.deepcopy(_plain(model), memo)))
    if "forward" in vars(instance):
        vars(instance)[_PATCHED] = vars(instance).pop("forward")
    _attach(instance, vars(model)["remat"].options)
    assert isinstance(instance, nn.Module)
    return instance
