"""Plans for calls that differ from those that were planned: in sizes, types, frozen parameters, autocast.

A call of another kind gets a plan of its own, up to `ANEW` times. Where only sizes differ, the plan is made
with these as symbols, at the largest ones so far, so that it serves every other batch, too. A call that
cannot be planned runs the original forward, with the reason.

A plan gives way to another, too, when an output has received a gradient that it was not made for (`rerun`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from remat.ir import GuardError, InfeasibleBudgetError, UnsupportedGraphError
from remat.ir.structure import take_tensors

from .failure import ALWAYS_RAISED
from .guards import Call, State
from .kept import Entry, Family, changing, largest
from .outside import Outside, Remedy
from .rerun import because
from .sizes import at_sizes, why_not_at

if TYPE_CHECKING:
    from .dropin import Remat

ANEW = 8
"""Plans that are made because calls have changed in kind; further changes fall back."""


def in_family(
    remat: "Remat",
    served: tuple[Family, State] | None,
    model: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    tensors: list[torch.Tensor],
) -> Entry:
    """The plan for a call that a family covers, made if there is none; no family: the first plan.

    Args:
        remat: of the drop-in.
        served: the family, with parameters and buffers as they are now.
        model: the drop-in.
        forward: its original forward, bound.
        call: normalised arguments.
        tensors: of the call.

    Raises:
        GuardError: it is for new sizes, and the user wants no plans for these.
    """
    resident = remat.resident(model, served)
    family = served[0] if served else None
    narrow = _narrow(remat, family, call) if family and remat.options.outputs else []
    if family is None or remat.stepping.other is not None or narrow:
        entry = remat.make(model, forward, call, resident, family)
        if family and narrow:
            _forget(remat, family, narrow, call)
        return entry
    found = family.at(tensors, resident)
    if found is not None and (found.beside >= remat.beside(model) or remat.anew >= ANEW):
        return found
    known = family.distinct(resident) if family.dynamic else []
    reason = why_not_at(known[0].planned, tensors) if known and found is None else ""
    if found is not None:
        reason = "other models hold more than was planned for"
        remat.anew += 1
    elif reason and remat.options.on_new_size == "refuse":
        raise _refused(reason)
    entry = remat.make(model, forward, call, resident, family)
    if reason:
        _replanned(remat, reason)
    return entry


def _narrow(remat: "Remat", family: Family, call: Call) -> list[Entry]:
    """Plans of a family that lack an output which has turned out to receive a gradient."""
    wanted = remat.options.outputs_of(call)
    return [entry for entry in family.distinct(resident=False) if _lacking(entry, wanted)]


def _lacking(entry: Entry, wanted: Sequence[int]) -> list[int]:
    program = entry.planned.program
    spare = program.spare.outputs if program and program.spare else ()
    return [i for i in wanted if i in spare]


def _forget(remat: "Remat", family: Family, narrow: list[Entry], call: Call) -> None:
    """Keep plans no longer that are too narrow, now that there is another; it has been said why."""
    family.entries = {
        key: entry
        for key, entry in family.entries.items()
        if not any(entry is other for other in narrow)
    }
    lacking = _lacking(narrow[-1], remat.options.outputs_of(call))
    remat.stats.replanned[because(lacking)] += 1


def plan_outside(
    remat: "Remat", outside: Outside, model: nn.Module, forward: Callable[..., Any], call: Call
) -> Entry | None:
    """A plan for a call of a new kind; None if it runs the original forward.

    Raises:
        GuardError: it is of new sizes, and the user wants no plans for these.
    """
    sizes = outside.remedy is Remedy.SIZES
    if sizes and remat.options.on_new_size == "refuse":
        raise _refused(outside.why)
    known = remat.anew >= ANEW or outside.why in remat.unplannable
    if outside.remedy is Remedy.NONE or known:
        return None
    remat.anew += 1
    try:
        entry = _at_changing_sizes(remat, model, forward, call) if sizes else None
        entry = entry or remat.make(model, forward, call, remat.resident(model, None))
    except Exception as error:  # whatever it is: the call can run as it is
        if remat.options.on_failure == "raise" or isinstance(error, ALWAYS_RAISED):
            raise
        remat.unplannable[outside.why] = (
            f"{outside.why}; that cannot be planned: {type(error).__name__}: {error}"
        )
        return None
    _replanned(remat, outside.why)
    return entry


def _at_changing_sizes(
    remat: "Remat", model: nn.Module, forward: Callable[..., Any], call: Call
) -> Entry | None:
    """A plan for a call whose sizes differ from those before, and for others; None if there is none."""
    tensors, pattern = take_tensors(call)
    like, resident = remat.kept.families[-1], remat.resident(model, None)
    dynamic = {} if remat.options.dynamic else changing(like, forward, tensors, pattern)
    if not dynamic:
        return None
    at = at_sizes(forward, call, dynamic, largest(like, dynamic, forward, tensors, pattern))
    try:
        remat.make(model, forward, at, resident, dynamic=dynamic)
        entry = remat.kept.families[-1].at(tensors, resident)
    except (UnsupportedGraphError, InfeasibleBudgetError):  # perhaps there is one for this call
        entry = None
    if entry is None and remat.kept.families[-1] is not like:
        remat.kept.families.pop()
    return entry


def _replanned(remat: "Remat", reason: str) -> None:
    remat.stats.replanned[reason] += 1
    remat.warn(
        "replanned",
        f"remat: made another plan: {reason}. Such plans are counted, with their reasons, in "
        "model.remat.stats.replanned.",
    )


def _refused(reason: str) -> GuardError:
    return GuardError(
        f"no plan covers this call: {reason}. Plan for larger sizes, or let more plans be made: "
        'on_new_size="replan".'
    )
