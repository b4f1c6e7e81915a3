"""One forward whose backward may still come: what it holds until then, and who hears of it."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from remat.ir._torch import keeps_graph, queue_callback

from .eager_run import Eager
from .program import Program
from .rerun import Rerun, refusal


@dataclass(frozen=True, slots=True)
class View:
    """A saved value that is made again as a view of a tensor that autograd saves."""

    of: int
    """Position of that tensor, among the outputs or the primals."""
    layout: tuple[int, ...]
    """Strides of that tensor."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the first one of that tensor to the first one of the view."""

    def again(self, tensor: torch.Tensor) -> torch.Tensor:
        """The saved value. A saved-tensor hook may have put the tensor elsewhere, in other strides."""
        base = tensor.detach()
        if base.stride() != self.layout:
            base = torch.empty_strided(
                base.shape, self.layout, dtype=base.dtype, device=base.device
            ).copy_(base)
        offset = int(base.storage_offset()) + self.offset
        return base.as_strided(self.size, self.stride, offset)


def view(of: int, base: torch.Tensor, tensor: torch.Tensor) -> View:
    """How to make a saved value again.

    What shares memory with an output or a primal is made again from that, which autograd saves: so a
    change of it is noticed, and no saved value keeps an output, its history and thereby itself alive.
    """
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return View(of, base.stride(), tensor.shape, tensor.stride(), offset)


class Listener(Protocol):
    """Whoever runs the program, and wants to know."""

    def begun(self) -> None:
        """A forward has run whose backward may come; called once for each forward."""

    def done(self) -> None:
        """A backward has run, or can run no more; called once for each forward."""

    def held(self, count: int, size: int) -> None:
        """The caller holds outputs that the protocol says it drops: their number and bytes."""

    def given(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward begins: the gradients of the outputs that have a history."""

    def made(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """A stage has run; what it is about to deliver."""

    def running(self, phase: str) -> AbstractContextManager[None]:
        """Context in which a graph runs."""


@dataclass(slots=True)
class Frame:
    """One forward whose backward may still come."""

    program: Program
    listener: Listener
    rerun: Rerun | None = None
    """What it takes to run it again in eager; None: it is not."""
    saved: list[str] = field(default_factory=list)
    """Names of the values that the entry saves, in order."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Sizes that backward reads, by name."""
    of_outputs: dict[str, View] = field(default_factory=dict)
    of_primals: dict[str, View] = field(default_factory=dict)
    returned: list["weakref.ref[torch.Tensor]"] = field(default_factory=list)
    """Outputs that the caller should have dropped when backward begins."""
    alone: tuple[int, ...] = ()
    """Primals that have a gradient through outputs alone that the plan was not made for."""
    env: dict[str, Any] = field(default_factory=dict)
    """While backward runs: values by name."""
    missing: frozenset[int] = frozenset()
    apart: dict[int, torch.Tensor] = field(default_factory=dict)
    """While backward runs: gradients of outputs that do not come by the entry."""
    eager: Eager | None = None
    """While backward runs: the forward as eager has run it again."""
    gradients: dict[int, torch.Tensor | None] | None = None
    """While backward runs in eager: what stages deliver, by primal."""
    keep: bool = False
    done: bool = False

    def begin(self, *, anew: bool) -> None:
        """Backward begins: however much of it is asked for, nothing is left over when it ends.

        Args:
            anew: this is the first node of it. There may be something left over if another has failed.

        Raises:
            RuntimeError: its gradients are to be differentiated again.
        """
        if torch.is_grad_enabled():  # eager could; a plan would take them for constants
            self.finish()
            raise RuntimeError(
                "remat: a planned step cannot be differentiated twice (create_graph=True). Run such steps "
                "without the plan: model.remat.disable() before their forward, enable() after backward."
            )
        if anew:
            self.clear()
        self.keep = keeps_graph()
        queue_callback(self.finish if not self.keep else self.clear)

    def by_eager(
        self, entry: Any, primals: Sequence[int], given: Mapping[int, torch.Tensor], *, keep: bool
    ) -> dict[int, torch.Tensor | None]:
        """Gradients that the plan was not made for.

        Args:
            entry: node of autograd from which the chain of stages begins.
            primals: positions of those that are asked for.
            given: gradients of outputs, by position.
            keep: others are asked for later in this backward.

        Raises:
            GuardError: the forward cannot be run again.
            RuntimeError: by autograd, for tensors that it has saved and that were changed since.
        """
        try:
            if self.eager is None:
                if self.rerun is None:
                    raise refusal(self.program, given)
                _unpack(entry, len(self.program.parts.stages))
                self.eager = self.rerun.forward(given)
            return self.eager.gradients(primals, given, keep=keep)
        except BaseException:
            self.finish()  # torch does not call back after an error
            raise

    def clear(self) -> None:
        """Backward has ended, and may run again."""
        self.env, self.apart, self.eager, self.gradients = {}, {}, None, None

    def finish(self) -> None:
        """The forward is no longer outstanding."""
        self.clear()
        self.rerun = None
        if not self.done:
            self.done = True
            self.listener.done()

    def __del__(self) -> None:
        """An abandoned forward is no longer outstanding either."""
        self.finish()


def _unpack(entry: Any, stages: int) -> None:
    """Look at all that autograd has saved: it raises if something was changed, or is there no more."""
    node = entry
    tuple(node.saved_tensors)
    for _ in range(stages):
        node, _ = node.next_functions[0]
        tuple(node.saved_tensors)


def given_of(
    outputs: Sequence[int], gradients: Sequence[torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    """The gradients that there are, by output.

    Args:
        outputs: positions of a node's outputs.
        gradients: of what it returned, which may be more.
    """
    pairs = zip(outputs, gradients, strict=False)
    return {i: gradient for i, gradient in pairs if gradient is not None}
