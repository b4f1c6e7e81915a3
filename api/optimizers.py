"""Which optimizer a step is planned with: the one given, the one found, or one assumed."""

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .optimizer_models import MODELS

_ours: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers that were made to know their state: never found as the user's."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """The optimizer whose state and temporaries are counted."""

    instance: Optimizer | None
    """Over the model's parameters; None if no optimizer step is counted."""
    how: str
    """For the summary: what it is and where it is known from."""


def find_optimizer(module: nn.Module, asked: Optimizer | str | None) -> Assumed:
    """Resolve the `optimizer` argument of `optimize_checkpoints`.

    Args:
        module: the model.
        asked: an optimizer, the name of a class of `torch.optim`, None, or "auto": the live optimizer that
            holds the model's parameters, else AdamW.

    Raises:
        ValueError: no optimizer of that name.
    """
    if asked is None:
        return Assumed(None, "none")
    if isinstance(asked, Optimizer):
        asked = _unwrapped(asked)
        return Assumed(asked, f"{type(asked).__name__}, given")
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return Assumed(None, "none: no parameter is trained")
    if asked == "auto":
        live = live_optimizer(parameters)
        if live is not None:
            return Assumed(live, f"{type(live).__name__}, found holding the parameters")
        return Assumed(_make(torch.optim.AdamW, parameters), "AdamW, assumed")
    by_name = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    by_name |= MODELS
    if asked.lower() not in by_name:
        known = sorted(set(by_name) - {"lbfgs", "sparseadam"})  # need more than dense gradients
        raise ValueError(f"no optimizer {asked!r}; there are {', '.join(known)}")
    cls = by_name[asked.lower()]
    return Assumed(_make(cls, parameters), f"{cls.__name__}, by name")


def _make(cls: Any, parameters: list[nn.Parameter]) -> Optimizer:
    made: Optimizer = cls(parameters)
    _ours.add(made)
    return made


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that this one hands everything on to, as accelerate's do; else itself."""
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value.state is optimizer.state:
            return value
    return optimizer


def live_optimizer(parameters: list[nn.Parameter]) -> Optimizer | None:
    """The optimizer in the process that holds most of the parameters; None if none holds any."""
    wanted = {id(p) for p in parameters}
    classes = _subclasses(Optimizer)
    held = [
        (
            sum(id(p) in wanted for group in candidate.param_groups for p in group["params"]),
            candidate,
        )
        for candidate in gc.get_objects()
        if type(candidate) in classes
        and hasattr(candidate, "param_groups")
        and candidate not in _ours
        and not any(isinstance(value, Optimizer) for value in vars(candidate).values())
    ]
    count, found = max(held, key=lambda entry: entry[0], default=(0, None))
    return found if count else None


def _subclasses(cls: type) -> set[type]:
    """The class and all that derive from it: a million objects are asked whether they are of one."""
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def traits(optimizer: Optimizer | None) -> object:
    """What the memory of an optimizer step depends on: its class and which options are on."""
    if optimizer is None:
        return None
    return type(optimizer), {name: _is_on(value) for name, value in optimizer.defaults.items()}


def _is_on(value: object) -> object:
    """An option without its strength: a learning rate needs the same bytes whatever it is."""
    return value if value is None or isinstance(value, bool | str) else bool(value)


class Watcher(Protocol):
    """Wants to know which optimizers step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Called after each step of every optimizer in the process."""


_watchers: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


def watch_optimizers(watcher: Watcher) -> None:
    """Call `watcher.optimizer_stepped` from now on, for as long as `watcher` lives."""
    _watchers.add(watcher)
    _register_hook()


@functools.cache
def _register_hook() -> None:
    """One hook for all watchers, never removed: torch runs hooks while it iterates over them."""
    register_optimizer_step_post_hook(_tell_watchers)


def _tell_watchers(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watcher in list(_watchers):
        watcher.optimizer_stepped(optimizer)
