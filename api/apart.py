"""Outputs of which the plan knows no gradient, where parameters have one through these alone.

Say, a second head whose output no loss has used so far. The plan has no gradient for such parameters, so no
stage can deliver it. The node of these outputs stands before the entry, and has the parameters:

    spare outputs <- apart (parameters of these alone) <- entry <- stage 0 <- stage 1 <- ...
    other outputs <- entry

So they take part in a backward, and their hooks fire, only if it comes through such an output, as in eager.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .pending import Frame, given_of


class Apart(torch.autograd.Function):
    """Takes the gradients of spare outputs, and returns those of the parameters that are theirs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        frame: Frame,
        outputs: list[torch.Tensor],
        which: Sequence[int],
        link: torch.Tensor,
        *alone: torch.Tensor,
    ) -> Any:
        """The outputs, with this node as their history.

        Args:
            ctx: of autograd.
            frame: of the forward.
            outputs: to be returned; emptied.
            which: their positions.
            link: an output of the entry, so that this node runs before it.
            alone: `Frame.alone`.
        """
        ctx.set_materialize_grads(False)
        ctx.frame, ctx.which = frame, which
        returned = tuple(outputs)
        outputs.clear()
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients of `alone`, by eager."""
        frame: Frame = ctx.frame
        frame.begin(anew=True)
        frame.apart = given_of(ctx.which, gradients)
        if not frame.apart:
            return (None,) * (4 + len(frame.alone))
        entry = ctx.next_functions[0][0]
        made = frame.by_eager(entry, frame.alone, frame.apart, keep=True)
        return None, None, None, torch.empty(0), *made.values()
