"""Dispatch: which training calls run a plan, and when a plan is made.

A training call runs the planned graph within the guards of the plan, and the original forward outside
them, counted. A plan is made on the first training call, or for an example; again when gradients are
resident though it assumed none, and when another optimizer than the assumed one steps. Eval mode,
`no_grad` and compilers never come here: they see the original forward.
"""

import contextlib
import inspect
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.ir import GuardError, InfeasibleBudgetError
from remat.ir.capture import argument_names
from remat.ir.structure import rebuilder, take_tensors
from remat.passes import Plan

from .beside import MODELS, Others, follow
from .budget import available_memory
from .distributed import buckets_of, plan_together
from .explain import explain
from .guards import Call, Guard, described, make_guard, normalize
from .module_state import traced_hooks
from .optimizers import Assumed, find_optimizer, traits, watch_optimizers
from .options import Options, device_of
from .outstanding import left_bytes
from .planner import Planned
from .progress import progress
from .request import Request
from .runtime import run
from .sizes import at_sizes, peak_at, prepared_for, why_not_at
from .wrappers import is_sharded, refuse_sharded

SHARDED = Assumed(None, "none: the parameters are sharded")
"""The optimizer of a sharded model, which holds shards that the plan does not know."""
PLANS = 8
"""Plans that are kept; each has its own graphs."""


@dataclass(slots=True)
class Stats:
    """What the calls of a drop-in did."""

    planned: int = 0
    """Training calls that ran a plan (or the original forward, where the plan says so)."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Training calls outside the guards, which ran the original forward, by reason."""
    plans: int = 0
    """Plans that were made."""
    replanned: Counter[str] = field(default_factory=Counter)
    """Those of them that were made for new sizes, by size and reason."""


@dataclass(frozen=True, slots=True)
class _Entry:
    guard: Guard
    planned: Planned
    rebuild: Callable[[Any], Any]
    needs: tuple[bool, ...]
    """Which tensor arguments require a gradient. A generator trains through a discriminator whose own step
    needs none: two kinds of call, each with its plan."""
    beside: int
    """Bytes that are counted for other models."""
    left: int
    """Bytes that a forward leaves for its backward."""


_Key = tuple[bool, tuple[Any, ...]]
_numbers = itertools.count()
"""Of drop-ins, in the order in which they are made: the same on all ranks of a training run."""


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
        self.number = next(_numbers)
        self._entries: dict[_Key, _Entry] = {}
        """By whether gradients are resident when the forward begins, and by what the arguments are if sizes
        are dynamic."""
        self._current: _Entry | None = None
        self._outstanding = 0
        self._followed = 0
        """The same, of forwards that ran as they are because a plan says so."""
        self._others = Others(self.number)
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

    def disable(self) -> None:
        """Run the original forward from now on."""
        self.enabled = False

    def enable(self) -> None:
        """Run the plan again."""
        self.enabled = True

    def make(
        self, model: nn.Module, forward: Callable[..., Any], call: Call, resident: bool
    ) -> _Entry:
        """Plan for a call, and keep the plan.

        Args:
            model: the drop-in.
            forward: its original forward, bound.
            call: normalised arguments.
            resident: gradients exist when the forward begins.
        """
        refuse_sharded(model)
        tensors, pattern = take_tensors(call)
        dynamic = self.options.dynamic or {}
        names = argument_names(forward, pattern, len(tensors)) if dynamic else [""] * len(tensors)
        needs = _needs(tensors)
        known = [e.planned for e in self._distinct(resident=False) if e.needs == needs]
        asked = self._stepped or self.options.optimizer
        buckets = buckets_of(model)
        beside = self._beside(model, again=True)
        protocol = self.options.protocol
        request = Request(
            module=model,
            forward=forward,
            args=call[0],
            kwargs=call[1],
            budget=self.options.budget_bytes(model),
            loss_fn=self.options.loss_fn,
            optimizer=SHARDED if is_sharded(model) else find_optimizer(model, asked),
            protocol=replace(
                protocol,
                gradients_resident=resident or buckets.resident_gradients,
                other_bytes=protocol.other_bytes + buckets.bytes + beside,
            ),
            cost_model=self.options.device_for_cost(model),
            limits=self.options.limits,
            patterns=self.options.patterns,
            dynamic=self.options.dynamic,
        )
        if hooked := traced_hooks(model):
            self._warn(
                "hooks",
                f"remat: {', '.join(hooked)} have hooks. They run while the plan is made; what they compute "
                "becomes part of the plan, what else they do does not happen in planned steps.",
            )
        with self._original_runs(), progress() as report:
            name, first = f"{self.number}/{self.stats.plans}", self.stats.plans == 0
            try:
                planned = plan_together(request, report, prepared_for(request, known), name, first)
            except InfeasibleBudgetError as error:
                if beside:
                    error.add_note(f"{beside} bytes are counted for other models in this process.")
                raise
        captured = planned.prepared.capture
        dims = tuple(frozenset(dynamic.get(name, ())) for name in names)
        guard = make_guard(model, call, planned.prepared, dims)
        left = left_bytes(planned.trace)
        entry = _Entry(guard, planned, rebuilder(captured.output_pattern), needs, beside, left)
        if planned.domain.fixed and not self.stats.plans:
            sizes = ", ".join(f"{name} = {size}" for name, size in planned.domain.fixed.items())
            self._warn(
                "fixed",
                f"remat: the model needs {sizes} as numbers, so the plan holds for these only; other "
                "sizes are planned anew.",
            )
        if self._stepped is not None:  # only now: a plan that failed is asked for again
            self._stepped = None
            self._entries.clear()
        self._entries[resident, self._size(tensors)] = self._current = entry
        self._forget()
        self.stats.plans += 1
        if self.options.optimizer == "auto" and not is_sharded(model):
            self._assumed = traits(request.optimizer.instance)
            watch_optimizers(self)
        return entry

    def _size(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """What of a call's tensors the choice of a plan depends on."""
        return described(tensors) if self.options.dynamic else _needs(tensors)

    def _kind(self, tensors: list[torch.Tensor]) -> _Entry | None:
        """The entry for calls of this kind, None if there is none; the last one if the tensors are others."""
        current, needs = self._current, _needs(tensors)
        if current is None or current.needs == needs or not self.options.lazy:
            return current
        if len(current.needs) != len(needs):
            return current
        return next((e for e in self._entries.values() if e.needs == needs), None)

    def _beside(self, model: nn.Module, *, again: bool = False) -> int:
        """Bytes to count for other models in the process."""
        if not self.options.lazy:
            return 0
        return self._others.bytes(model, device_of(model), again=again)

    def left_bytes(self) -> int:
        """What forwards have left whose backward has not run, bytes, at the sizes of the last plan."""
        return self._current.left * (self._outstanding + self._followed) if self._current else 0

    def _distinct(self, resident: bool) -> list[_Entry]:
        """Entries that serve a call, each once, in the order in which they were made.

        Args:
            resident: gradients exist when the forward begins; a plan for that serves without them, too.
        """
        found = {id(e): e for (has, _), e in self._entries.items() if has or not resident}
        return list(found.values())

    def _forget(self) -> None:
        """Keep the last plans that were made."""
        kept = {id(entry) for entry in self._distinct(resident=False)[-PLANS:]}
        self._entries = {key: e for key, e in self._entries.items() if id(e) in kept}

    def _conflict(self, entry: _Entry, tensors: list[torch.Tensor]) -> str:
        """How a call has two numbers for one size; empty if it has not, or was seen before."""
        if (True, size := self._size(tensors)) in self._entries or (False, size) in self._entries:
            return ""
        try:
            entry.planned.request.sizes_in(tensors)
        except ValueError as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def _original_runs(self) -> Iterator[None]:
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
        self.make(model, forward, call, self.options.protocol.gradients_resident)

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
        tensors, pattern = take_tensors(call)
        previous, entry = self._current, self._kind(tensors)
        if entry is not None and (
            why := entry.guard.why_not(tensors, pattern) or self._conflict(entry, tensors)
        ):
            return self._fall_back(model, why, forward, args, kwargs)
        resident = self.options.protocol.gradients_resident or (
            _has_gradients(model) if entry is None else entry.guard.has_gradients()
        )
        if entry is None or self._stepped is not None:
            entry = self.make(model, forward, call, resident)
        else:
            entry = self._at(tensors, resident)
            if entry is None or entry.beside < self._beside(model):
                entry = self._plan_again(model, forward, call, resident)
        if entry is not previous or not self.stats.planned:
            self._check_device(model, entry)
        self._current = entry
        self.stats.planned += 1
        self._check_outstanding(entry)
        if entry.planned.program is None:
            return self._followed_through(forward(*args, **kwargs))
        primals = entry.guard.primals(tensors)
        return entry.rebuild(run(entry.planned.program, primals, _Frames(weakref.ref(self))))

    def _at(self, tensors: list[torch.Tensor], resident: bool) -> _Entry | None:
        """The entry for a call's tensors; None if there is no plan for them.

        A plan for resident gradients serves where there are none, too.
        """
        size = self._size(tensors)
        found = self._entries.get((resident, size))
        if found is None and not resident:
            found = self._entries.get((True, size))
        if found is not None or not self.options.dynamic:
            return found
        for entry in self._distinct(resident):
            if entry.needs == _needs(tensors) and not why_not_at(entry.planned, tensors):
                self._entries[resident, size] = entry
                return entry
        return None

    def _plan_again(
        self, model: nn.Module, forward: Callable[..., Any], call: Call, resident: bool
    ) -> _Entry:
        """Make a plan for a call that none covers.

        Raises:
            GuardError: it is for new sizes, and the user wants no plans for these.
        """
        tensors, _ = take_tensors(call)
        known = self._distinct(resident) if self.options.dynamic else []
        reason = why_not_at(known[0].planned, tensors) if known else ""
        if reason and self.options.on_new_size == "refuse":
            raise GuardError(
                f"no plan covers this call: {reason}. Plan for larger sizes, or let more plans be made: "
                'on_new_size="replan".'
            )
        entry = self.make(model, forward, call, resident)
        if reason:
            self.stats.replanned[reason] += 1
            self._warn(
                "new size",
                f"remat: made another plan: {reason}. Such plans are counted, with their reasons, in "
                "model.remat.stats.replanned.",
            )
        return entry

    def _fall_back(
        self,
        model: nn.Module,
        why: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        refuse_sharded(model)
        self.stats.fallbacks[why] += 1
        unused = "" if self.stats.planned else " No call has run the plan so far."
        self._warn(
            "fallback",
            f"remat: a training call ran the original forward, without the memory cap: {why}. Such "
            f"calls are counted, with their reasons, in model.remat.stats.fallbacks.{unused}",
        )
        return forward(*args, **kwargs)

    def _followed_through(self, output: Any) -> Any:
        """The output of a forward that ran as it is; counts as outstanding until its backward begins."""
        tracked = [tensor for tensor in take_tensors(output)[0] if tensor.requires_grad]
        if tracked and len(MODELS) > 1:
            self._followed += 1
            follow(tracked[0], _Frames(weakref.ref(self)).passed)
        return output

    def _check_device(self, model: nn.Module, entry: _Entry) -> None:
        where = device_of(model)
        beside = self._others.bytes(model, where)
        peak = entry.planned.plan.peak_bytes + max(0, beside - entry.beside)
        if peak > (memory := available_memory(where)):
            others = f", {beside} of them for other models" if beside else ""
            self._warn(
                "device",
                f"remat: the step is planned to take {peak} bytes{others}, and the device has {memory} for "
                "this process. Plan with a smaller budget, or keep fewer models there.",
            )

    def _check_outstanding(self, entry: _Entry) -> None:
        planned_for = entry.planned.plan.protocol.forwards_outstanding
        if self._outstanding >= planned_for:
            self._warn(
                "outstanding",
                f"remat: {self._outstanding + 1} forwards are outstanding, planned for {planned_for}; each "
                "keeps its saved activations, so the budget may be exceeded. Pass "
                f"protocol=StepProtocol(forwards_outstanding={self._outstanding + 1}).",
            )

    def _warn(self, key: str, message: str, stacklevel: int = 7) -> None:
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


@dataclass(frozen=True, slots=True)
class _Frames:
    """What a drop-in hears of its forwards; does not keep it alive."""

    remat: "weakref.ref[Remat]"

    def begun(self) -> None:
        if (remat := self.remat()) is not None:
            remat._outstanding += 1

    def done(self) -> None:
        if (remat := self.remat()) is not None:
            remat._outstanding -= 1

    def passed(self) -> None:
        if (remat := self.remat()) is not None:
            remat._followed -= 1

    def held(self, count: int, size: int) -> None:
        if (remat := self.remat()) is not None:
            remat._warn(
                "held",
                f"remat: planned for outputs_held=False, but {count} outputs ({size} bytes) are still held "
                "when backward begins, so the budget may be exceeded. Drop them before backward, or plan "
                "with protocol=StepProtocol(outputs_held=True).",
                stacklevel=10,  # the line that calls backward
            )


def _needs(tensors: list[torch.Tensor]) -> tuple[bool, ...]:
    return tuple([tensor.requires_grad for tensor in tensors])


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())
