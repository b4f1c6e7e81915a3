"""A planned step that is verified: its forward, and the eager one beside it. See `verify`."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from remat.ir import VerifyError
from remat.ir.structure import take_tensors

from .frames import Frames
from .guards import Call
from .kept import Entry
from .out_of_memory import is_out_of_memory
from .rerun import kept_before
from .runtime import run
from .verify import Inputs, Verification, not_verified, state_before

if TYPE_CHECKING:
    from .dropin import Remat


def run_verified(
    remat: "Remat", entry: Entry, model: nn.Module, forward: Callable[..., Any], call: Call
) -> Any:
    """Run a planned forward and compare it with eager; its backward is compared when it runs.

    Args:
        remat: of the drop-in.
        entry: the plan, which does not run the model as it is.
        model: the drop-in.
        forward: its original forward, bound.
        call: normalised arguments.

    Raises:
        VerifyError: they differ.
    """
    planned = entry.planned
    assert planned.program is not None
    tensors, pattern = take_tensors(call)
    primals = entry.guard.primals(tensors)
    parameters = len(planned.interface.parameters)
    inputs = Inputs(model, forward, call, entry.guard.names, primals, parameters)
    step = Verification(planned, inputs, state_before(inputs))
    frames = Frames(weakref.ref(remat), step)
    rerun = kept_before(remat, entry, primals, pattern, step)
    output = entry.rebuild(run(planned.program, primals, frames, rerun))
    try:
        with remat.original_runs(model):
            step.forward(output)
    except VerifyError as error:
        remat.give_up(str(error))
        raise
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step.skip()
        remat.stats.verified = "not verified: out of memory"
        remat.warn("not verified", not_verified(error))
    return output
