"""Whether a model can be captured and planned, where it fails, and what a plan would not see.

`module:factory` names a function without arguments that returns a model, or ``(model, args)``,
``(model, args, kwargs)`` or ``(model, args, kwargs, loss_fn)`` for one training call. A script is run until
its model trains; finding the model there is `first_call`'s, given as `find`.

Nothing is trained, and the model is as before. Without example arguments only what can be seen without a
call is looked at.

    python -m remat doctor package.module:factory
    python -m remat doctor train.py argument ...
"""

import argparse
import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from remat.ir import InfeasibleBudgetError, RematError
from remat.ir.capture import explained

from .budget import in_units
from .dropin import Remat
from .explain import rests_on
from .module_state import traced_hooks
from .optimize import optimize_checkpoints

SHOWN = 3
"""Names that are listed of what there are many."""
LARGE = "1000000GB"
"""A budget that every step fits, so that baseline and least peak are found and nothing is solved."""


@dataclass(frozen=True, slots=True)
class Example:
    """A model and one training call of it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    @property
    def has_call(self) -> bool:
        """There are arguments to call the model with."""
        return bool(self.args or self.kwargs)


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found out about a model."""

    model: str
    """Name of its class."""
    captured: bool
    planned: bool
    ops: int
    """Of the captured step; 0 if it was not captured."""
    guards: int
    """Tensors, attributes and hooks that are compared at every call; 0 if there is no plan."""
    baseline_peak_bytes: int
    """Peak of the whole step as it is; 0 if it was not planned."""
    least_peak_bytes: int
    """The smallest budget for which a plan was found; 0 if it was not planned."""
    failure: str
    """Why it was not planned, with the user's line if it is known, and what to do; empty if it was."""
    notes: tuple[str, ...]
    """What a plan does otherwise than the user may expect."""
    counted: str = ""
    """What both peaks count beside the model."""

    def __str__(self) -> str:
        """All of it, for people."""
        if self.planned:
            head = [
                f"{self.model} can be planned: {self.ops} ops, {self.guards} guards.",
                f"  peak of a step as it is   {in_units(self.baseline_peak_bytes):>12}",
                f"  least peak that was found {in_units(self.least_peak_bytes):>12}",
                f"  counted: {self.counted}",
            ]
        elif self.failure:
            head = [f"{self.model} cannot be planned.", *_indented(self.failure)]
        else:
            head = [
                f"{self.model}: no example arguments, so it was not captured. Let the factory return "
                "(model, args) or (model, args, kwargs)."
            ]
        return "\n".join([*head, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> str:
        """The same for programs."""
        return json.dumps(asdict(self), indent=1)


def doctor(
    target: str,
    arguments: Sequence[str] = (),
    find: Callable[[Path, Sequence[str]], Example] | None = None,
) -> Checkup:
    """Examine the model that a script trains or a factory makes.

    Args:
        target: path of a script, or ``module:factory``.
        arguments: of the script.
        find: runs a script up to its first training call and gives what it calls.

    Raises:
        ValueError: the target is neither, or the factory returns something else.
    """
    if target.endswith(".py"):
        if find is None:
            raise ValueError(f"{target} is a script; here only module:factory can be examined")
        return examine(find(Path(target), arguments))
    return examine(made(target))


def examine(example: Example) -> Checkup:
    """Examine a model."""
    model, name = example.model, type(example.model).__name__
    with custom_functions() as functions:
        failure, remat = _plan(example)
    notes = (*_notes(model), *_function_notes(functions))
    planned = remat.planned if remat is not None else None
    if planned is None or remat is None:
        return Checkup(name, False, False, 0, 0, 0, 0, failure, notes)
    return Checkup(
        model=name,
        captured=True,
        planned=True,
        ops=len(planned.prepared.graph.ops),
        guards=remat.guards(),
        baseline_peak_bytes=planned.plan.baseline_peak_bytes,
        least_peak_bytes=planned.plan.least_peak_bytes,
        failure="",
        notes=notes,
        counted=rests_on(planned.plan)[0].removeprefix("counted: "),
    )


def _plan(example: Example) -> tuple[str, Remat | None]:
    """Why no plan could be made, and the drop-in's `remat`; neither without a call."""
    if not example.has_call:
        return "", None
    try:
        model = optimize_checkpoints(
            example.model,
            LARGE,
            example.args,
            example.kwargs,
            loss_fn=example.loss_fn,
            time_limit_s=10.0,
            on_failure="raise",
        )
    except InfeasibleBudgetError as error:  # no device is that large
        return str(error), None
    except RematError as error:
        return str(error), None
    except Exception as error:  # whatever the user's code raises
        return str(explained(error)), None
    return "", vars(model)["remat"]


def made(target: str) -> Example:
    """What a factory makes."""
    module, colon, name = target.rpartition(":")
    if not (module and colon and name):
        raise ValueError(f"cannot read {target!r}: name a script (train.py) or module:factory")
    folder, module = os.path.split(module)
    where = folder if module.endswith(".py") else ""
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        factory = getattr(importlib.import_module(module.removesuffix(".py")), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"there is no {target}: {error}. Modules are looked for in {os.getcwd()} first; "
            "folder/file.py:factory is one elsewhere"
        ) from error
    if isinstance(factory, nn.Module) or not callable(factory) or _required(factory):
        raise ValueError(f"{target} should be a function without arguments that returns a model")
    made = factory()
    if isinstance(made, nn.Module):
        return Example(made)
    if not isinstance(made, tuple) or not made or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"{target} returned a {type(made).__name__}; it should return a model, (model, args), (model, "
            "args, kwargs) or (model, args, kwargs, loss_fn)"
        )
    return Example(*made)


def _required(factory: Callable[..., object]) -> bool:
    """It has arguments that must be given."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return True
    except ValueError:  # built in
        return False
    return False


@contextlib.contextmanager
def custom_functions() -> Iterator[list[str]]:
    """Collect the names of the `torch.autograd.Function`s that are applied inside."""
    found: list[str] = []
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    @classmethod  # type: ignore[misc]
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        found.append(cls.__name__)
        return original.__func__(cls, *args, **kwargs)

    function.apply = apply
    try:
        yield found
    finally:
        function.apply = original


def _notes(model: nn.Module) -> Iterator[str]:
    """What a look at the modules shows."""
    named = dict(model.named_modules())
    if not model.training:
        yield "the model is in eval mode; a plan is for the mode in which it is made. Call model.train()."
    if hooked := traced_hooks(model):
        yield (
            f"{_some(hooked)} have hooks: what they compute becomes part of the plan, what else they do does "
            "not happen in planned steps."
        )
    random = [n for n, m in named.items() if isinstance(m, _DropoutNd) and m.p > 0 and m.training]
    if random:
        yield f"{_some(random)} drop out at random: planned steps draw the masks that eager draws."
    norms = [n for n, m in named.items() if isinstance(m, _NormBase) and m.track_running_stats]
    if norms:
        yield f"{_some(norms)} keep running statistics: planned steps update them once, as eager does."
    on = [
        n or "the model" for n, m in named.items() if vars(m).get("gradient_checkpointing") is True
    ]
    if on:
        yield (
            f"{_some(on)} checkpoint activations already. A plan replaces that, and is better without: "
            "model.gradient_checkpointing_disable()."
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        yield f"{_some(frozen)} are frozen: thawing them later is another plan."


def _function_notes(functions: Sequence[str]) -> Iterator[str]:
    names = list(dict.fromkeys(functions))
    if "CheckpointFunction" in names:
        yield "the forward uses torch.utils.checkpoint with use_reentrant=True; pass use_reentrant=False."
        names.remove("CheckpointFunction")
    if names:
        yield (
            f"custom autograd functions {_some(names)}: their ops are planned; side effects happen once, "
            "while the plan is made."
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``doctor``; returns 0 if the model can be planned, 1 if not, 2 for bad use."""
    parser = argparse.ArgumentParser(
        "remat doctor",
        description="Say whether a model can be planned, and where it fails.",
    )
    parser.add_argument("target", help="a script (train.py), or module:factory")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if not options.target.endswith(".py"):  # a factory has no arguments of its own
        options.json |= "--json" in options.arguments
    from .first_call import first_call  # which runs scripts, and knows our `Example`

    try:
        found = doctor(options.target, options.arguments, first_call)
    except ValueError as error:
        print(f"remat: error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"remat: error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    print(found.to_json() if options.json else found)
    return 0 if found.planned else 1
