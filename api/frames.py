"""What a drop-in hears of its forwards, each until its backward has run; does not keep the drop-in alive."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from remat.ir import VerifyError

from .out_of_memory import out_of_memory_explained
from .outstanding import held_text
from .verify import Verification, not_verified

if TYPE_CHECKING:
    from .dropin import Remat


@dataclass(frozen=True, slots=True)
class Frames:
    """Listens to one forward and its backward; see `runtime.Listener`."""

    remat: "weakref.ref[Remat]"
    verification: Verification | None = None
    """If the step is verified."""

    def begun(self) -> None:
        """A forward has run whose backward may come."""
        if (remat := self.remat()) is not None:
            remat.outstanding += 1

    def done(self) -> None:
        """The backward has run, or can run no more."""
        if (remat := self.remat()) is not None:
            remat.outstanding -= 1
            if self.verification is not None:
                remat.step_verified(self.verification)

    def passed(self) -> None:
        """The backward of a forward that ran as it is has begun."""
        if (remat := self.remat()) is not None:
            remat.followed -= 1

    def held(self, count: int, size: int) -> None:
        """Outputs are kept that the protocol says are dropped."""
        if (remat := self.remat()) is not None:
            # 9 frames up is the line that calls backward.
            remat.warn("held", held_text(count, size), stacklevel=9)

    def given(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward begins."""
        if self.verification is None:
            return
        try:
            self.verification.given(gradients)
        except RuntimeError as error:
            if (remat := self.remat()) is not None:
                remat.stats.verified = f"not verified: {str(error).splitlines()[0]}"
                remat.warn("not verified", not_verified(error))

    def made(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """A stage has run."""
        if self.verification is None:
            return
        try:
            self.verification.made(stage, gradients)
        except VerifyError as error:
            if (remat := self.remat()) is not None:
                remat.give_up(str(error))
            raise

    def running(self, phase: str) -> AbstractContextManager[None]:
        """Around a graph that runs: explains it if memory runs out."""
        remat = self.remat()
        if remat is None:
            return nullcontext()
        return out_of_memory_explained(lambda: remat.circumstances(phase), remat.stats)
