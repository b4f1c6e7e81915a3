"""The whole step: forward and backward, then the optimizer step.

The two parts are traced apart, since the optimizer step is the same whatever came before it. What
outlives backward (gradients, loss, held outputs) is held during the optimizer step too, and what the
optimizer keeps from step to step is there from the beginning.
"""

from collections.abc import Sequence
from dataclasses import replace

from remat.ir import Block, Trace


def whole_step(trace: Trace, resident: Sequence[Block], optimizer: Trace | None) -> Trace:
    """Put an optimizer step behind a trace.

    Args:
        trace: forward and backward.
        resident: further blocks that are on the device throughout, such as optimizer state.
        optimizer: one steady-state optimizer step. Its own resident blocks are not taken over: they
            are gradients and parameters, which `trace` holds, or they are in `resident`.
    """
    n = len(trace.instants)
    later = len(optimizer.instants) if optimizer else 0
    blocks = [replace(b, death=b.death if b.death < n else n + later) for b in trace.blocks]
    blocks += [replace(b, birth=-1, death=n + later) for b in resident]
    if optimizer:
        blocks += [
            replace(b, birth=n + b.birth, death=n + b.death)
            for b in optimizer.blocks
            if b.birth >= 0
        ]
    return Trace(trace.instants + (optimizer.instants if optimizer else ()), tuple(blocks))
