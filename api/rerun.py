"""A planned step whose backward the plan was not made for: its gradients are computed by eager.

A plan fixes which outputs receive a gradient. Where backward sends one into another output (a model returns
its loss, and the script adds a loss of its own, computed from the logits), the original forward runs again
at the beginning of backward, from the state that the planned one found: generators, buffers that the step
updates, autocast. Its backward gets the gradients of all outputs, and what that yields is delivered in the
place of the plan's: hooks fire, and gradients are accumulated, as ever. Generators and buffers are left as
they are. That step has no memory cap. The next call is planned with that output (see `anew`).

The forward runs on copies of the parameters that share their memory, so `.grad` and hooks of parameters do
not see it. Parts that the model checkpoints itself run once.

Not handled, a `GuardError`: outputs that the user has named himself; a step that updates an argument or a
parameter in place; a model that is gone, or that was changed between forward and backward, arguments
included (where backward needs what was changed, autograd raises).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from remat.ir import GuardError
from remat.ir.autocast import autocast

from .eager_run import Eager, eager_forward
from .generators import generators, generators_at
from .out_of_memory import out_of_memory_explained
from .program import Program

if TYPE_CHECKING:
    from .dropin import Remat
    from .guards import Guard
    from .kept import Entry
    from .verify import Verification


@dataclass(frozen=True, slots=True)
class Rerun:
    """What it takes to run a planned forward again in eager."""

    remat: "weakref.ref[Remat]"
    program: Program
    primals: Sequence[torch.Tensor]
    """Arguments are detached: one that is changed by an output later would keep itself alive here."""
    pattern: object
    """Of the call."""
    states: tuple[bytes, ...]
    """Of the generators, before the forward; none if it draws no random numbers. They are no tensors, because
    those would count as memory of the step."""
    read: tuple[torch.Tensor, ...]
    """Copies of what the step reads and updates in place, as it was."""
    versions: list[int]
    """Of the primals that autograd does not watch."""
    cached: bool
    """Autocast keeps casts."""
    verification: "Verification | None"

    def forward(self, given: Mapping[int, torch.Tensor]) -> Eager:
        """Run the forward again, say so, and have the next call planned for these gradients, too.

        Args:
            given: gradients of outputs, by position.

        Raises:
            GuardError: that is not possible any more.
        """
        remat = self.remat()
        model = remat.owner() if remat is not None else None
        if remat is None or model is None:
            raise refusal(self.program, given, "the model is gone")
        if self.verification is not None:
            self.verification.skip()
        outputs = unplanned(self.program, given)
        remat.options = remat.options.with_outputs(
            self.pattern, (*self.program.gradient_results, *outputs)
        )
        guard = _guard_of(remat, self.program)
        if guard is None or (why := self._why_not(guard)):
            raise refusal(self.program, given, why if guard else "the plan is no longer kept")
        reason = because(outputs)

        def running() -> AbstractContextManager[None]:
            return out_of_memory_explained(
                lambda: remat.circumstances("backward", reason), remat.stats
            )

        with running(), remat.original_runs(model):
            eager = self._run(model, guard, running)
        remat.stats.uncapped[reason] += 1
        remat.warn("unplanned", _text(outputs), stacklevel=10)  # the line that calls backward
        return eager

    def _why_not(self, guard: "Guard") -> str:
        """Why the forward would not be the same again; empty if it would."""
        if change := guard.state.change():
            return f"since its forward, {change.why}"
        for name, (table, key), primal in zip(
            guard.names, guard.places, self.primals, strict=False
        ):
            if table.get(key) is not primal:
                return f"{name} has been replaced since its forward"
        spare = self.program.spare
        assert spare is not None
        for i, was, now in zip(
            spare.unsaved, self.versions, _versions(self.primals, spare.unsaved), strict=True
        ):
            if now != was:
                count = len(guard.names)
                name = guard.names[i] if i < count else f"tensor argument {i - count}"
                return f"{name} has been changed in place since its forward"
        return ""

    def _run(
        self, model: nn.Module, guard: "Guard", running: Callable[[], AbstractContextManager[None]]
    ) -> Eager:
        spare = self.program.spare
        assert spare is not None
        were = {i: self.primals[i] for i in spare.updated}
        were |= dict(zip(spare.read, self.read, strict=True))
        needs = [*guard.needs, *(argument[-1] for argument in guard.arguments)]
        copies: list[torch.Tensor] = []
        for i, (primal, needed) in enumerate(zip(self.primals, needs, strict=True)):
            copy = were[i].detach().clone() if i in were else primal.detach()
            as_parameter = isinstance(primal, nn.Parameter)
            copies.append(
                nn.Parameter(copy, needed) if as_parameter else copy.requires_grad_(needed)
            )
        forward: Callable[..., Any] = type(model)._remat_original.fget(model)  # type: ignore[attr-defined]
        states = tuple(torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in self.states)
        states = states or generators(self.primals)
        with (
            torch.enable_grad(),
            generators_at(states, self.primals),
            autocast(guard.autocast, cached=self.cached),
        ):
            _, outputs = eager_forward(
                model, forward, self.pattern, guard.names, self.primals, copies
            )
        return Eager(copies, outputs, running)


def kept_before(
    remat: "Remat",
    entry: "Entry",
    primals: Sequence[torch.Tensor],
    pattern: object,
    verification: "Verification | None" = None,
) -> Rerun | None:
    """What it takes to run again a planned forward that is about to run; None if it never will be.

    Args:
        remat: of the drop-in.
        entry: the plan.
        primals: parameters, buffers and arguments.
        pattern: of the call.
        verification: of the step, if it is verified.
    """
    program, guard = entry.planned.program, entry.guard
    spare = program.spare if program else None
    if program is None or spare is None or remat.options.outputs is None or guard.updates:
        return None
    if spare.updated and spare.updated[0] < len(entry.planned.interface.parameters):
        return None  # copies of parameters may be large
    count = len(guard.names)
    return Rerun(
        weakref.ref(remat),
        program,
        [*primals[:count], *[argument.detach() for argument in primals[count:]]],
        pattern,
        tuple([s.numpy().tobytes() for s in generators(primals)]) if spare.random else (),
        tuple([primals[i].clone() for i in spare.read]),
        _versions(primals, spare.unsaved),
        torch.is_autocast_cache_enabled(),
        verification,
    )


def unplanned(program: Program, given: Mapping[int, torch.Tensor]) -> list[int]:
    """Outputs among those that have gradients that the plan was not made for."""
    return [i for i in sorted(given) if i not in program.gradient_results]


def refusal(
    program: Program, given: Mapping[int, torch.Tensor], why_not_again: str = ""
) -> GuardError:
    """The error for gradients that the plan was not made for."""
    again = f" It cannot be run again without the plan: {why_not_again}." if why_not_again else ""
    return GuardError(
        f"{named(unplanned(program, given))}, but the plan was made for gradients of "
        f"{list(program.gradient_results)} only.{again} Pass "
        'protocol=StepProtocol(gradient_outputs="all") to optimize_checkpoints.'
    )


def named(outputs: Sequence[int]) -> str:
    """That outputs receive a gradient, for people."""
    if len(outputs) == 1:
        return f"output tensor {outputs[0]} receives a gradient"
    return f"output tensors {', '.join(map(str, outputs))} receive gradients"


def because(outputs: Sequence[int]) -> str:
    """Why there is another plan."""
    return f"{named(outputs)}, unlike when it was planned"


def _text(outputs: Sequence[int]) -> str:
    return (
        f"remat: {named(outputs)}, which the plan was not made for. The gradients of this step have been "
        "computed by the original forward, run again in eager, without the memory cap. The next call is "
        "planned for such gradients, too; that is counted in model.remat.stats.replanned."
    )


def _guard_of(remat: "Remat", program: Program) -> "Guard | None":
    entries = (e for family in remat.kept.families for e in family.distinct(resident=False))
    return next((e.guard for e in entries if e.planned.program is program), None)


def _versions(tensors: Sequence[torch.Tensor], which: Sequence[int]) -> list[int]:
    """How often tensors have been changed in place; those of inference mode do not count it."""
    try:
        return [tensors[i]._version for i in which]
    except RuntimeError:
        return [0 if (t := tensors[i]).is_inference() else t._version for i in which]
