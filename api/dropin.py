"""Dispatch: which training calls run a plan, and when a plan is made.

A training call runs the planned graph within the guards of the plan, and the original forward outside
them, counted. A plan is made on the first training call, or for an example; again when gradients are
resident though it assumed none, and when another optimizer than the assumed one steps. Eval mode,
`no_grad` and compilers never come here: they see the original forward.
"""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.ir import GuardError
from remat.ir.capture import argument_names
from remat.ir.structure import rebuilder, take_tensors
from remat.passes import Plan

from .entries import Entries, Entry
from .explain import explain
from .failure import ALWAYS_RAISED, reason_of, short, unplanned
from .frames import Frames
from .guards import Call, make_guard, normalize
from .module_state import traced_hooks
from .optimizers import find_optimizer, traits, watch_optimizers
from .options import Options
from .out_of_memory import Circumstances, out_of_memory_explained
from .planned import Planned
from .planner import make_plan
from .progress import progress
from .runtime import run
from .sizes import at_sizes, peak_at, prepared_for, why_not_at
from .stats import Stats
from .verified_step import run_verified
from .verify import Verification


class Remat:
    """Everything of ours on a drop-in: plan, statistics, explanation, switches."""

    def __init__(self, options: Options, signature: inspect.Signature) -> None:
        """Start without a plan.

        Args:
            options: what the user asked for.
            signature: of the model's own forward, bound.
        """
        self.options = options
        self.signature = signature
        self.stats = Stats()
        self.enabled = True
        self._entries = Entries(bool(options.dynamic))
        self._current: Entry | None = None
        self.outstanding = 0
        """Forwards whose backward has not run."""
        self._unverified: Entry | None = None
        """With `verify`: the plan of which no step has been verified."""
        self._warned: set[str] = set()
        self._assumed: object = None
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: Optimizer | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first training call if no example was given."""
        return self._current.planned.plan if self._current else None

    @property
    def planned(self) -> Planned | None:
        """The plan with the graphs and the trace that it was made of."""
        return self._current.planned if self._current else None

    @property
    def forward_graph(self) -> fx.GraphModule | None:
        """The planned forward; None if the original forward runs."""
        parts = self._current.planned.parts if self._current else None
        return parts.forward if parts else None

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """The planned backward in one graph (it runs in stages); None if the original forward runs."""
        parts = self._current.planned.parts if self._current else None
        return parts.backward if parts else None

    def explain(self) -> str:
        """What the plan does and what it rests on, as text."""
        if self.stats.failed:
            return f"No plan, the original model trains: {self.stats.failed}"
        if self._current is None:
            return "No plan yet: it is made on the first training call."
        return explain(self._current.planned, self.stats)

    def peak_at(self, **sizes: int) -> int:
        """Peak of the plan in use at other sizes, bytes, with what kernels take there measured.

        Args:
            sizes: number of every name in `dynamic`.

        Raises:
            GuardError: there is no plan, or it cannot run at these sizes.
        """
        if self._current is None:
            raise GuardError("there is no plan yet: it is made on the first training call")
        return peak_at(self._current.planned, sizes)

    def guards(self) -> int:
        """Conditions that are compared at every call of the plan in use."""
        return self._current.guard.conditions() if self._current else 0

    def disable(self) -> None:
        """Run the original forward from now on."""
        self.enabled = False

    def enable(self) -> None:
        """Run the plan again; try to make one, if that has failed."""
        self.enabled = True
        self.stats.failed = ""
        self._entries.refused.clear()

    def make(
        self, model: nn.Module, forward: Callable[..., Any], call: Call, resident: bool
    ) -> Entry:
        """Plan for a call, and keep the plan.

        Args:
            model: the drop-in.
            forward: its original forward, bound.
            call: normalised arguments.
            resident: gradients exist when the forward begins.
        """
        tensors, pattern = take_tensors(call)
        dynamic = self.options.dynamic or {}
        names = argument_names(forward, pattern, len(tensors)) if dynamic else [""] * len(tensors)
        known = [entry.planned for entry in self._entries.distinct(resident=False)]
        asked = self._stepped or self.options.optimizer
        request = self.options.request(
            model, forward, call, find_optimizer(model, asked), resident
        )
        if hooked := traced_hooks(model):
            self.warn(
                "hooks",
                f"remat: {', '.join(hooked)} have hooks. They run while the plan is made; what they compute "
                "becomes part of the plan, what else they do does not happen in planned steps.",
            )
        with self.original_runs(), progress() as report:
            planned = make_plan(request, report, prepared_for(request, known))
        captured = planned.prepared.capture
        dims = tuple(frozenset(dynamic.get(name, ())) for name in names)
        guard = make_guard(model, call, planned.prepared, dims)
        entry = Entry(guard, planned, rebuilder(captured.output_pattern))
        if planned.domain.fixed and not self.stats.plans:
            sizes = ", ".join(f"{name} = {size}" for name, size in planned.domain.fixed.items())
            self.warn(
                "fixed",
                f"remat: the model needs {sizes} as numbers, so the plan holds for these only; other "
                "sizes are planned anew.",
            )
        if self._stepped is not None:  # only now: a plan that failed is asked for again
            self._stepped = None
            self._entries.clear()
        self._entries.keep(entry, tensors, resident)
        self._current = entry
        self.stats.plans += 1
        self._unverified = entry if self.options.verify else None
        if self.options.optimizer == "auto":
            self._assumed = traits(request.optimizer.instance)
            watch_optimizers(self)
        return entry

    def _conflict(self, entry: Entry, tensors: list[torch.Tensor]) -> str:
        """How a call has two numbers for one size; empty if it has not, or was seen before."""
        if self._entries.has_size(tensors):
            return ""
        try:
            entry.planned.request.sizes_in(tensors)
        except ValueError as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def original_runs(self) -> Iterator[None]:
        """While the model is traced, its forward is the original one."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def prepare(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Mapping[str, int],
    ) -> None:
        """Plan for example arguments, at other sizes if some are given."""
        forward: Callable[..., Any] = type(model)._remat_original.fget(model)  # type: ignore[attr-defined]
        call = normalize(self.signature, args, kwargs)
        if call is None:
            self.signature.bind(*args, **kwargs)
        assert call is not None
        call = at_sizes(forward, call, self.options.dynamic or {}, sizes)
        try:
            self.make(model, forward, call, self.options.protocol.gradients_resident)
        except Exception as error:
            if self.options.on_failure != "warn" or isinstance(error, ALWAYS_RAISED):
                raise
            self.give_up(reason_of(error))
            self.warn("failed", unplanned(self.stats.failed), stacklevel=4)

    def call(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one training call: by plan within its guards, else by the original forward."""
        call = normalize(self.signature, args, kwargs)
        if call is None:
            return forward(*args, **kwargs)  # which says better what is wrong
        if self.stats.failed:
            self.stats.fallbacks[short(self.stats.failed)] += 1
            return forward(*args, **kwargs)
        tensors, pattern = take_tensors(call)
        entry = self._current
        if entry is not None and (
            why := entry.guard.why_not(tensors, pattern) or self._conflict(entry, tensors)
        ):
            return self._fall_back(why, forward, args, kwargs)
        resident = self.options.protocol.gradients_resident or (
            _has_gradients(model) if entry is None else entry.guard.has_gradients()
        )
        if why := self._entries.why_refused(tensors, resident):
            return self._fall_back(why, forward, args, kwargs)
        try:
            entry = self._entry(model, forward, call, tensors, resident)
        except Exception as error:  # whatever a trace of the user's code may raise
            return self._without_plan(error, resident, forward, args, kwargs)
        self._current = entry
        self.stats.planned += 1
        self._check_outstanding(entry)
        if entry.planned.program is None:
            with out_of_memory_explained(lambda: self.circumstances("forward"), self.stats):
                return forward(*args, **kwargs)
        if entry is self._unverified:
            self._unverified = None
            return run_verified(self, entry, model, forward, call)
        primals = entry.guard.primals(tensors)
        return entry.rebuild(run(entry.planned.program, primals, Frames(weakref.ref(self))))

    def _entry(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        tensors: list[torch.Tensor],
        resident: bool,
    ) -> Entry:
        """The plan for a call that is within the guards; makes one if there is none."""
        if self._current is None or self._stepped is not None:
            return self.make(model, forward, call, resident)
        found = self._entries.at(tensors, resident)
        return found or self._plan_again(model, forward, call, resident)

    def _without_plan(
        self,
        error: Exception,
        resident: bool,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the original forward where planning has failed, unless that is to be raised.

        What the original forward raises, too, is no failure of planning: the next call plans.
        """
        if self.options.on_failure == "raise" or isinstance(error, ALWAYS_RAISED):
            raise error
        output = forward(*args, **kwargs)
        why = reason_of(error)
        if self._current is None:
            self.give_up(why)
        else:
            tensors, _ = take_tensors((args, kwargs))
            self._entries.refuse(short(why), tensors, resident)
        self.stats.fallbacks[short(why)] += 1
        self.warn("failed", unplanned(why))
        return output

    def step_verified(self, step: Verification) -> None:
        """The backward of a step that is verified has ended; without a result, the next one is verified."""
        if step.done:
            self.stats.verified = step.summary()
        elif not step.skipped and not self.stats.failed and self._current is not None:
            self._unverified = self._current

    def give_up(self, why: str) -> None:
        """Run the original forward from now on."""
        self.stats.failed = why
        self._entries.clear()
        self._unverified = None

    def circumstances(self, phase: str, unplanned: str = "") -> Circumstances | None:
        """What is known of a step that runs out of memory; None if there is no plan."""
        if self._current is None:
            return None
        other = type(self._stepped).__name__ if self._stepped is not None else ""
        outstanding = max(0, self.outstanding - (phase == "backward"))
        return Circumstances(phase, self._current.planned.plan, outstanding, other, unplanned)

    def _plan_again(
        self, model: nn.Module, forward: Callable[..., Any], call: Call, resident: bool
    ) -> Entry:
        """Make a plan for a call that none covers.

        Raises:
            GuardError: it is for new sizes, and the user wants no plans for these.
        """
        tensors, _ = take_tensors(call)
        known = self._entries.distinct(resident) if self.options.dynamic else []
        reason = why_not_at(known[0].planned, tensors) if known else ""
        if reason and self.options.on_new_size == "refuse":
            raise GuardError(
                f"no plan covers this call: {reason}. Plan for larger sizes, or let more plans be made: "
                'on_new_size="replan".'
            )
        entry = self.make(model, forward, call, resident)
        if reason:
            self.stats.replanned[reason] += 1
            self.warn(
                "new size",
                f"remat: made another plan: {reason}. Such plans are counted, with their reasons, in "
                "model.remat.stats.replanned.",
            )
        return entry

    def _fall_back(
        self, why: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stats.fallbacks[why] += 1
        unused = "" if self.stats.planned else " No call has run the plan so far."
        self.warn(
            "fallback",
            f"remat: a training call ran the original forward, without the memory cap: {why}. Such "
            f"calls are counted, with their reasons, in model.remat.stats.fallbacks.{unused}",
        )
        with out_of_memory_explained(lambda: self.circumstances("forward", why), self.stats):
            return forward(*args, **kwargs)

    def _check_outstanding(self, entry: Entry) -> None:
        planned_for = entry.planned.plan.protocol.forwards_outstanding
        if self.outstanding >= planned_for:
            self.warn(
                "outstanding",
                f"remat: {self.outstanding + 1} forwards are outstanding, planned for {planned_for}; each "
                "keeps its saved activations, so the budget may be exceeded. Pass "
                f"protocol=StepProtocol(forwards_outstanding={self.outstanding + 1}).",
            )

    def warn(self, key: str, message: str, stacklevel: int = 7) -> None:
        """Warn once; 7 frames up is the line that calls the model."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=stacklevel)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """With optimizer="auto": plan again if this one, not the assumed one, holds the parameters."""
        if self._current is None or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        mine = {id(p) for p in self._current.guard.trained()}
        if traits(optimizer) != self._assumed and any(
            id(p) in mine for group in optimizer.param_groups for p in group["params"]
        ):
            self._stepped = optimizer


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())
