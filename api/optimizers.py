"""Which optimizer a step is planned with: the one given, the one found, or one assumed."""

import gc
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer


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
        return Assumed(asked, f"{type(asked).__name__}, given")
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return Assumed(None, "none: no parameter is trained")
    if asked == "auto":
        live = _live_optimizer(parameters)
        if live is not None:
            return Assumed(live, f"{type(live).__name__}, found holding the parameters")
        return Assumed(torch.optim.AdamW(parameters), "AdamW, assumed")
    by_name = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if asked.lower() not in by_name:
        raise ValueError(
            f"no optimizer {asked!r} in torch.optim; there are {', '.join(sorted(by_name))}"
        )
    cls = by_name[asked.lower()]
    return Assumed(cls(parameters), f"{cls.__name__}, by name")


def _live_optimizer(parameters: list[nn.Parameter]) -> Optimizer | None:
    """The most recent optimizer in the process that holds one of the parameters."""
    wanted = {id(p) for p in parameters}
    found = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), Optimizer)
        and any(
            id(p) in wanted
            for group in getattr(candidate, "param_groups", ())
            for p in group["params"]
        )
    ]
    return found[-1] if found else None
