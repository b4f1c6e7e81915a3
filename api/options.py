"""The options of `optimize_checkpoints`, checked once."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir.fake import Dynamic
from remat.passes import Patterns, StepProtocol, device, planned_for_cuda
from remat.solvers import Limits

from .assumed_loss import assumed_loss
from .budget import budget_bytes, device_memory
from .guards import Call
from .optimizers import Assumed
from .request import Request
from .wrappers import refuse_wrapped

Kind = tuple[int, tuple[str, ...]]
"""Of a call: how many arguments come by position, and the names of the others. Outputs depend on that."""


def _kind(call: Any) -> Kind:
    args, kwargs = call
    return len(args), tuple(kwargs)


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    budget: float | str
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: Optimizer | str | None
    protocol: StepProtocol
    cost_model: str
    limits: Limits
    patterns: Patterns
    dynamic: Dynamic | None = None
    on_new_size: str = "replan"
    cache_dir: Path | None = None
    verify: bool = False
    on_failure: str | None = None
    sees_others: bool = True
    """Other models in the process are counted. Not if the plan is for an example: it may be made while models
    are alive that will not be there in training, and is what the protocol says."""
    outputs: Mapping[Kind, tuple[int, ...]] | None = None
    """Outputs that have turned out to receive a gradient, by kind of call; None: the user says which do."""

    def budget_bytes(self, model: nn.Module) -> int:
        """The budget in bytes; parts of a device refer to the one that the plan is for."""
        if planned_for_cuda(model, self.cost_model):
            return budget_bytes(self.budget, device(self.cost_model).memory_bytes)
        return budget_bytes(self.budget, device_memory(device_of(model)))

    def outputs_of(self, call: Any) -> tuple[int, ...]:
        """Outputs to plan for because they have turned out to receive a gradient; usually none.

        Args:
            call: normalised arguments, or their pattern.
        """
        return self.outputs.get(_kind(call), ()) if self.outputs else ()

    def with_outputs(self, call: Any, outputs: Iterable[int]) -> "Options":
        """The options for a model of which these outputs have turned out to receive a gradient.

        Args:
            call: normalised arguments, or their pattern.
            outputs: their positions.
        """
        found = tuple(sorted({*self.outputs_of(call), *outputs}))
        return replace(self, outputs={**(self.outputs or {}), _kind(call): found})

    def request(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        optimizer: Assumed,
        protocol: StepProtocol,
        dynamic: Dynamic,
    ) -> Request:
        """What is asked for, for one call.

        Args:
            model: the model.
            forward: its original forward, bound.
            call: normalised arguments.
            optimizer: whose state counts.
            protocol: what is resident when.
            dynamic: sizes that change.
        """
        loss_fn = self.loss_fn
        if outputs := self.outputs_of(call):
            protocol = replace(protocol, gradient_outputs=outputs)
            if loss_fn is assumed_loss:
                loss_fn = partial(assumed_loss, used=outputs)
        return Request(
            module=model,
            forward=forward,
            args=call[0],
            kwargs=call[1],
            budget=self.budget_bytes(model),
            loss_fn=loss_fn,
            optimizer=optimizer,
            protocol=protocol,
            cost_model=self.device_for_cost(model),
            limits=self.limits,
            patterns=self.patterns,
            dynamic=dynamic or None,
            cache_dir=self.cache_dir,
        )

    def device_for_cost(self, model: nn.Module) -> str:
        """Name of the device whose roofline predicts times, or "timed"."""
        if self.cost_model != "roofline":
            return self.cost_model
        where = device_of(model)
        return (
            _known_or_generic(torch.cuda.get_device_name(where)) if where.type == "cuda" else "cpu"
        )


def patterns_of(save: Sequence[str], recompute: Sequence[str]) -> Patterns:
    """Both options as patterns.

    Raises:
        TypeError: one is no tuple or list of strings.
        ValueError: a pattern is empty.
    """
    for option, given in (("save", save), ("recompute", recompute)):
        if not isinstance(given, tuple | list) or not all(isinstance(p, str) for p in given):
            raise TypeError(
                f"{option} must be a tuple of patterns, such as ('layers.*::aten.mm*',), not {given!r}"
            )
        if not all(pattern.replace("::", "") for pattern in given):
            raise ValueError(f"{option} holds an empty pattern; '*' is every op of the forward")
    return Patterns(tuple(save), tuple(recompute))


def check(options: Options, model: nn.Module) -> None:
    """Raise for what cannot be meant, before anything is done.

    Raises:
        ValueError: bad budget, unknown device, limits below zero, an optimizer of other parameters.
        TypeError: not a module, not a budget, not an optimizer, a loss of more than the output.
        UnsupportedGraphError: the model is replicated or sharded already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    refuse_wrapped(model)
    options.budget_bytes(model)
    check_loss(options.loss_fn)
    _check_optimizer(options.optimizer, model)
    if options.on_new_size not in ("replan", "refuse"):
        raise ValueError(f"on_new_size is 'replan' or 'refuse', not {options.on_new_size!r}")
    if options.on_failure not in ("warn", "raise", None):
        raise ValueError(f"on_failure is 'warn', 'raise' or None, not {options.on_failure!r}")
    if options.dynamic is not None:
        check_dynamic(options.dynamic, model)
        if not any(options.dynamic.values()):
            raise ValueError(f"dynamic names at least one dimension: {_DYNAMIC}")
    if options.cost_model not in ("roofline", "timed"):
        device(options.cost_model)
    if options.limits.time_s <= 0 or options.limits.gap < 0:
        raise ValueError("time_limit_s must be above zero and gap must not be below it")


_DYNAMIC = '{"input_ids": {0: "batch", 1: "seq"}}'


def check_dynamic(dynamic: object, model: nn.Module) -> None:
    """Raise for names of sizes that cannot be meant.

    Raises:
        TypeError: no mapping of mappings.
        ValueError: a dimension that is no number from 0, no name, an argument that the model does not have.
    """
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(dims, Mapping) for dims in dynamic.values()
    ):
        raise TypeError(f"dynamic maps arguments to names of their dimensions: {_DYNAMIC}")
    named = [(dim, name) for dims in dynamic.values() for dim, name in dims.items()]
    if not all(type(dim) is int and dim >= 0 for dim, _ in named):
        raise ValueError(f"dynamic names dimensions, counted from 0: {_DYNAMIC}")
    if bad := [name for _, name in named if not (isinstance(name, str) and name.isidentifier())]:
        raise ValueError(f"dynamic gives names, such as 'batch', not {bad[0]!r}: {_DYNAMIC}")
    parameters = inspect.signature(model.forward).parameters
    unknown = [argument for argument in dynamic if argument not in parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"dynamic names {unknown[0]!r}, which is no argument of the model's forward; it has "
            f"{', '.join(parameters)}"
        )


def check_example(args: object) -> None:
    """Raise a TypeError for example arguments that are not in a tuple or list."""
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"example_args must be a tuple of positional arguments, not {type(args).__name__}: pass (x,) "
            "instead of x, or a dict of keyword arguments as example_kwargs"
        )


def check_loss(loss_fn: Callable[[Any], torch.Tensor] | None) -> None:
    """Raise a TypeError for a loss that is not a function of the output alone."""
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, not {type(loss_fn).__name__}")
    try:
        signature = inspect.signature(
            loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        )
    except ValueError:  # builtins have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"loss_fn is called with the model's output alone, which does not fit {signature}. Give the "
            "rest yourself: loss_fn=lambda output: criterion(output, example_target)"
        ) from error


def _check_optimizer(optimizer: object, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer | str | None):
        raise TypeError(
            "optimizer must be one torch.optim.Optimizer, the name of a class in torch.optim, 'auto' or "
            f"None, not {type(optimizer).__name__}. Of several optimizers only one can be counted."
        )
    if isinstance(optimizer, Optimizer):
        mine = {id(p) for p in model.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"the {type(optimizer).__name__} holds none of the model's parameters. Make it over "
                "model.parameters() of this model."
            )


def _known_or_generic(gpu: str) -> str:
    """The GPU's name if its speed is known, else "generic-gpu"."""
    try:
        device(gpu)
    except ValueError:
        return "generic-gpu"
    return gpu


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter; the CPU for a model without data or parameters."""
    for parameter in model.parameters():
        return torch.device("cpu") if parameter.is_meta else parameter.device
    return torch.device("cpu")
