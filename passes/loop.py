"""The loop around the model, as far as the memory of an eager step depends on it.

Of a record of two optimizer phases after one backward, the first step has the first phase, and a later
step the second, with what the first has left in place.
"""

from dataclasses import dataclass, replace

from remat.ir import Trace


@dataclass(frozen=True, slots=True)
class Loop:
    """What one training step does beside forward, loss, backward and optimizer step."""

    accumulation_steps: int = 1
    """Forwards and backwards for one optimizer step; each loss is divided by their number."""
    gradients_resident: bool = False
    """Gradients exist when the step begins: `zero_grad(set_to_none=False)`, or they are dropped
    between forward and backward."""
    outputs_held: bool = False
    """A variable holds the model's output to the end of the step."""
    clips_gradients: bool = False
    """`clip_grad_norm_` before the optimizer step."""
    scales_loss: bool = False
    """`GradScaler`: the loss is multiplied, the gradients divided before the optimizer step."""
    master_weights: bool = False
    """The optimizer steps on float32 copies of the parameters, with float32 copies of the gradients
    that exist during its step."""


def only_first(trace: Trace, end: int) -> Trace:
    """The step that ends with the first optimizer phase.

    Args:
        trace: with two optimizer phases.
        end: instant at which the second begins.
    """
    blocks = (replace(b, death=min(b.death, end)) for b in trace.blocks if b.birth < end)
    return Trace(trace.instants[:end], tuple(blocks))


def without_first(trace: Trace, begin: int, end: int) -> Trace:
    """The step that ends with the second optimizer phase; what the first made and left is resident.

    Args:
        trace: with two optimizer phases.
        begin: instant at which the first begins.
        end: instant at which the second begins.
    """

    def moved(instant: int) -> int:
        return instant if instant < begin else max(begin - 1, instant - (end - begin))

    blocks = [
        replace(b, birth=-1 if begin <= b.birth < end else moved(b.birth), death=moved(b.death))
        for b in trace.blocks
        if b.death >= end or (b.birth < begin and begin > 0)
    ]
    instants = trace.instants[:begin] + trace.instants[end:]
    return Trace(instants, tuple(sorted(blocks, key=lambda block: block.birth)))
