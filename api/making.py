"""Making a plan for one call of a drop-in, with what else is on the device, and what is said of it once."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.ir import InfeasibleBudgetError
from remat.ir.fake import Dynamic
from remat.ir.functional import argument_names
from remat.ir.structure import rebuilder, take_tensors
from remat.passes import StepProtocol

from .distributed import buckets_of, plan_together
from .guards import Call, make_guard
from .kept import Entry
from .module_state import traced_hooks
from .optimizers import Assumed, find_optimizer
from .outstanding import left_bytes
from .planned import Planned
from .progress import progress
from .request import Request
from .sizes import prepared_for
from .wrappers import is_sharded, refuse_sharded

if TYPE_CHECKING:
    from .dropin import Remat

SHARDED = Assumed(None, "none: the parameters are sharded")
"""The optimizer of a sharded model, which holds shards that the plan does not know."""


def make_entry(
    remat: "Remat",
    model: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    resident: bool,
    dynamic: Dynamic,
    known: Sequence[Planned],
) -> Entry:
    """Plan for a call.

    Args:
        remat: of the drop-in.
        model: the drop-in.
        forward: its original forward, bound.
        call: normalised arguments.
        resident: gradients exist when the forward begins.
        dynamic: sizes that change.
        known: plans of the same kind, whose capture may serve.
    """
    refuse_sharded(model)
    beside = remat.beside(model, again=True)
    optimizer = SHARDED if is_sharded(model) else find_optimizer(model, remat.optimizer)
    protocol = _protocol(remat, model, resident, beside)
    request = remat.options.request(model, forward, call, optimizer, protocol, dynamic)
    _say_of_hooks(remat, model)
    planned = _planned(remat, request, known, beside)
    _say_of_plan(remat, planned)
    tensors, pattern = take_tensors(call)
    names = argument_names(forward, pattern, len(tensors)) if dynamic else [""] * len(tensors)
    dims = tuple(frozenset(dynamic.get(name, ())) for name in names)
    guard = make_guard(model, call, planned.interface, dims)
    rebuild = rebuilder(planned.interface.output_pattern)
    return Entry(guard, planned, rebuild, beside, left_bytes(planned.trace))


def _protocol(remat: "Remat", model: nn.Module, resident: bool, beside: int) -> StepProtocol:
    protocol, buckets = remat.options.protocol, buckets_of(model)
    return replace(
        protocol,
        gradients_resident=resident or buckets.resident_gradients,
        other_bytes=protocol.other_bytes + buckets.bytes + beside,
    )


def _planned(remat: "Remat", request: Request, known: Sequence[Planned], beside: int) -> Planned:
    name, first = f"{remat.number}/{remat.stats.plans}", remat.stats.plans == 0
    with remat.original_runs(request.module), _torch_quiet(), progress() as report:
        try:
            return plan_together(request, report, prepared_for(request, known), name, first)
        except InfeasibleBudgetError as error:
            if beside:
                error.add_note(f"{beside} bytes are counted for other models in this process.")
            raise


@contextlib.contextmanager
def _torch_quiet() -> Iterator[None]:
    """While a model is traced, errors are ours to report: torch logs them at length, handled or not."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in")
            yield
    finally:
        logger.setLevel(before)


def _say_of_hooks(remat: "Remat", model: nn.Module) -> None:
    if hooked := traced_hooks(model):
        remat.warn(
            "hooks",
            f"remat: {', '.join(hooked)} have hooks. They run while the plan is made; what they compute "
            "becomes part of the plan, what else they do does not happen in planned steps.",
        )


def _say_of_plan(remat: "Remat", planned: Planned) -> None:
    if planned.interface.checkpointed:
        remat.warn(
            "checkpoints",
            "remat: the model checkpoints parts of itself (torch.utils.checkpoint). In planned steps "
            "they run once, and the plan decides what is computed again; other calls checkpoint "
            "as before.",
        )
    if planned.domain.fixed and not remat.stats.plans:
        sizes = ", ".join(f"{name} = {size}" for name, size in planned.domain.fixed.items())
        remat.warn(
            "fixed",
            f"remat: the model needs {sizes} as numbers, so the plan holds for these only; other "
            "sizes are planned anew.",
        )
