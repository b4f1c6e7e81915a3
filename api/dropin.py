"""Dispatch: which training calls run a plan, and when a plan is made.

A training call runs the planned graph within the guards of the plan, and the original forward outside
them, counted. A plan is made on the first training call, or for an example; again when gradients are
resident though it assumed none, when another optimizer than the assumed one steps, and when calls have
changed in a way that another plan can follow (`outside`). Eval mode, `no_grad` and compilers never come
here: they see the original forward.
"""

import contextlib
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.ir import GuardError
from remat.ir._torch import in_transform
from remat.ir.fake import Dynamic
from remat.ir.structure import take_tensors
from remat.passes import Plan, joined

from .anew import in_family, plan_outside
from .beside import MODELS, Others, follow
from .budget import available_memory
from .explain import explain
from .failure import ALWAYS_RAISED, reason_of, short, unplanned
from .frames import Frames
from .guards import Call, State, arguments_of, described
from .kept import Entry, Family, Kept
from .making import SHARDED, make_entry
from .optimizers import traits, watch_optimizers
from .options import Options, device_of
from .out_of_memory import Circumstances, out_of_memory_explained
from .outside import Outside
from .outstanding import outstanding_text
from .planned import Planned
from .rerun import kept_before
from .runtime import run
from .sizes import at_sizes, peak_at
from .stats import Stats
from .step_reports import report_of_plan
from .stepping import Stepping
from .verified_step import run_verified
from .verify import Verification
from .views.step_report import Point, StepReport
from .wrappers import refuse_sharded

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
        self._arguments = arguments_of(signature)
        self.owner: Callable[[], nn.Module | None] = lambda: None
        """The drop-in."""
        self.stats = Stats()
        self.enabled = True
        self.number = next(_numbers)
        self.kept = Kept()
        """Plans that are kept."""
        self.anew = 0
        """Plans that were made because calls had changed in kind."""
        self.unplannable: dict[str, str] = {}
        """Kinds of calls that cannot be planned, by how they differ: why not."""
        self.entry: Entry | None = None
        """The plan in use."""
        self._refused: dict[tuple[Any, ...], str] = {}
        """Why there is no plan for calls with these arguments, though there is one for others."""
        self._unverified: Entry | None = None
        """With `verify`: the plan of which no step has been verified."""
        self.outstanding = 0
        """Planned forwards whose backward has not run."""
        self.followed = 0
        """The same, of forwards that ran as they are because a plan says so."""
        self._others = Others(self.number)
        self._warned: set[str] = set()
        self.stepping = Stepping()
        watch_optimizers(self)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first training call if no example was given."""
        return self.entry.planned.plan if self.entry else None

    @property
    def planned(self) -> Planned | None:
        """The plan with the graphs and the trace that it was made of."""
        return self.entry.planned if self.entry else None

    @property
    def forward_graph(self) -> fx.GraphModule | None:
        """The planned forward; None if the original forward runs."""
        parts = self.entry.planned.parts if self.entry else None
        return parts.forward if parts else None

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """The planned backward in one graph (it runs in stages); None if the original forward runs."""
        parts = self.entry.planned.parts if self.entry else None
        return joined(parts) if parts else None

    def guards(self) -> int:
        """Conditions that are compared at every call of the plan in use."""
        return self.entry.guard.conditions() if self.entry else 0

    @property
    def optimizer(self) -> Optimizer | str | None:
        """The one that the next plan counts."""
        return self.stepping.other or self.options.optimizer

    def explain(self) -> str:
        """What the plan does and what it rests on, as text."""
        if self.stats.failed:
            return f"No plan, the original model trains: {self.stats.failed}"
        if not self.enabled and self.entry is None:
            return "Disabled: the original model trains."
        if self.entry is None:
            return "No plan yet: it is made on the first training call."
        return explain(self.entry.planned, self.stats)

    def report(self, frontier: tuple[Point, ...] = ()) -> StepReport:
        """The plan in use, op by op and tensor by tensor, beside the eager step: to be seen and saved.

        Args:
            frontier: plans at other budgets, to be shown too; `plan_frontier` makes them.

        Raises:
            GuardError: there is no plan.
        """
        model = self.owner()
        if self.entry is None or model is None:
            raise GuardError("there is no plan yet: it is made on the first training call")
        with self.original_runs(model):  # of a plan from the cache, the eager step is followed now
            return report_of_plan(self.entry.planned, frontier)

    def peak_at(self, **sizes: int) -> int:
        """Peak of the plan in use at other sizes, bytes, with what kernels take there measured.

        Args:
            sizes: number of every name in `dynamic`.

        Raises:
            GuardError: there is no plan, or it cannot run at these sizes.
        """
        if self.entry is None:
            raise GuardError("there is no plan yet: it is made on the first training call")
        return peak_at(self.entry.planned, sizes)

    def disable(self) -> None:
        """Run the original forward from now on."""
        self.enabled = False

    def enable(self) -> None:
        """Run the plan again; try to make one, if that has failed."""
        self.enabled = True
        self.stats.failed = ""
        self._refused.clear()
        self.unplannable.clear()

    def make(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        resident: bool,
        family: Family | None = None,
        dynamic: Dynamic | None = None,
    ) -> Entry:
        """Plan for a call, and keep the plan.

        Args:
            model: the drop-in.
            forward: its original forward, bound.
            call: normalised arguments.
            resident: gradients exist when the forward begins.
            family: plans that the call belongs to; None if it is of a new kind.
            dynamic: sizes that change; those of the family or else of the options, if None.
        """
        dynamic = dynamic or (family.dynamic if family else self.options.dynamic) or {}
        known = [entry.planned for entry in family.distinct(resident=False)] if family else []
        entry = make_entry(self, model, forward, call, resident, dynamic, known)
        if self.stepping.other is not None:  # only now: a plan that failed is asked for again
            self.stepping.other = None
            self.kept, family = Kept(), None
        family = family or Family(entry.guard, dynamic)
        self.kept.add(family, family.key(take_tensors(call)[0], resident), entry)
        self.entry = entry
        self.stats.plans += 1
        self.stats.found += entry.planned.from_file
        self._unverified = entry if self.options.verify else None
        optimizer = entry.planned.request.optimizer
        self.stepping.assumed = None if optimizer is SHARDED else traits(optimizer.instance)
        return entry

    def beside(self, model: nn.Module, *, again: bool = False) -> int:
        """Bytes to count for other models in the process."""
        if not self.options.sees_others:
            return 0
        return self._others.bytes(model, device_of(model), again=again)

    def left_bytes(self) -> int:
        """What forwards have left whose backward has not run, bytes, at the sizes of the last plan."""
        return self.entry.left * (self.outstanding + self.followed) if self.entry else 0

    @contextlib.contextmanager
    def original_runs(self, model: nn.Module) -> Iterator[None]:
        """While the model is traced, its forward is the original one.

        What others have put around it is out of the way, too: accelerate wraps it in one `torch.autocast`,
        which stays on for ever if it is entered while it is entered.
        """
        enabled, self.enabled = self.enabled, False
        wrapped = vars(model).pop("forward", None)
        try:
            yield
        finally:
            self.enabled = enabled
            if wrapped is not None:
                vars(model)["forward"] = wrapped

    def prepare(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Mapping[str, int],
    ) -> None:
        """Plan for example arguments, at other sizes if some are given."""
        forward: Callable[..., Any] = type(model)._remat_original.fget(model)  # type: ignore[attr-defined]
        call = self._arguments.normalize(args, kwargs)
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
            self.warn("failed", unplanned(self.stats.failed), stacklevel=6)

    def call(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one training call: by plan within its guards, else by the original forward."""
        call = self._arguments.normalize(args, kwargs)
        if call is None:
            return forward(*args, **kwargs)  # which says better what is wrong
        if self.stats.failed:
            self.stats.fallbacks[short(self.stats.failed)] += 1
            return forward(*args, **kwargs)
        tensors, pattern = take_tensors(call)
        if why := self._why_unplanned(tensors):
            return self._fall_back(model, why, forward, args, kwargs)
        previous = self.entry
        try:
            served = self.kept.serving(tensors, pattern)
            if isinstance(served, Outside):
                entry = plan_outside(self, served, model, forward, call)
                why = self.unplannable.get(served.why, served.why)
            else:
                entry = in_family(self, served, model, forward, call, tensors)
        except Exception as error:  # whatever a trace of the user's code may raise
            return self._without_plan(error, model, forward, args, kwargs)
        if entry is None:
            return self._fall_back(model, why, forward, args, kwargs)
        if entry is not previous or not self.stats.planned:
            self._check_device(model, entry)
        self.entry = entry
        self._check_outstanding(entry)
        if entry.planned.program is None:
            with out_of_memory_explained(lambda: self.circumstances("forward"), self.stats):
                output = self._followed_through(forward(*args, **kwargs))
        else:
            output = self._run(entry, model, forward, call, (tensors, pattern))
        self.stats.planned += 1
        return output

    def _why_unplanned(self, tensors: list[torch.Tensor]) -> str:
        """Why a call is not planned, whatever plans there are; empty if nothing is in the way."""
        if in_transform():
            return "it is under a transform of torch.func, which plans do not take part in"
        return self._refused.get(described(tensors), "") if self._refused else ""

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> None:
        """Run calls with such arguments without a plan from now on."""
        call = self._arguments.normalize(args, kwargs)
        self._refused[described(take_tensors(call)[0])] = short(why)

    def _run(
        self,
        entry: Entry,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        taken: tuple[list[torch.Tensor], object],
    ) -> Any:
        """Run a plan's forward; `taken` are the tensors of the call, and its pattern."""
        assert entry.planned.program is not None
        if entry is self._unverified:
            self._unverified = None
            return run_verified(self, entry, model, forward, call)
        tensors, pattern = taken
        primals = entry.guard.primals(tensors)
        rerun = kept_before(self, entry, primals, pattern)
        return entry.rebuild(run(entry.planned.program, primals, Frames(weakref.ref(self)), rerun))

    def _without_plan(
        self,
        error: Exception,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the original forward where planning has failed, unless that is to be raised.

        What the original forward raises, too, is no failure of planning: the next call plans.
        """
        if self.options.on_failure == "raise" or isinstance(error, ALWAYS_RAISED):
            raise error
        refuse_sharded(model)  # the wrong order is the user's to mend
        output = forward(*args, **kwargs)
        why = reason_of(error)
        if self.entry is None:
            self.give_up(why)
        else:
            self.refuse(args, kwargs, why)
        self.stats.fallbacks[short(why)] += 1
        self.warn("failed", unplanned(why))
        return output

    def step_verified(self, step: Verification) -> None:
        """The backward of a step that is verified has ended; without a result, the next one is verified."""
        if step.done:
            self.stats.verified = step.summary()
        elif not step.skipped and not self.stats.failed and self.entry is not None:
            self._unverified = self.entry

    def give_up(self, why: str) -> None:
        """Run the original forward from now on."""
        self.stats.failed = why
        self.kept = Kept()
        self._unverified = None

    def circumstances(self, phase: str, unplanned: str = "") -> Circumstances | None:
        """What is known of a step that runs out of memory; None if there is no plan."""
        if self.entry is None:
            return None
        other = type(self.stepping.other).__name__ if self.stepping.other is not None else ""
        outstanding = max(0, self.outstanding - (phase == "backward"))
        return Circumstances(phase, self.entry.planned.plan, outstanding, other, unplanned)

    def resident(self, model: nn.Module, served: tuple[Family, State] | None) -> bool:
        """Gradients are there when the forward begins, or are to be planned for."""
        if self.options.protocol.gradients_resident:
            return True
        if served is None:
            return any(parameter.grad is not None for parameter in model.parameters())
        family, state = served
        return family.guard.has_gradients(state)

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
        self.warn(
            "fallback",
            f"remat: a training call ran the original forward, without the memory cap: {why}. Such "
            f"calls are counted, with their reasons, in model.remat.stats.fallbacks.{unused}",
        )
        with out_of_memory_explained(lambda: self.circumstances("forward", why), self.stats):
            return forward(*args, **kwargs)

    def _followed_through(self, output: Any) -> Any:
        """The output of a forward that ran as it is; counts as outstanding until its backward begins."""
        tracked = [tensor for tensor in take_tensors(output)[0] if tensor.requires_grad]
        if tracked and len(MODELS) > 1:
            self.followed += 1
            follow(tracked[0], Frames(weakref.ref(self)).passed)
        return output

    def _check_device(self, model: nn.Module, entry: Entry) -> None:
        where = device_of(model)
        beside = self._others.bytes(model, where)
        peak = entry.planned.plan.peak_bytes + max(0, beside - entry.beside)
        if peak > (memory := available_memory(where)):
            others = f", {beside} of them for other models" if beside else ""
            self.warn(
                "device",
                f"remat: the step is planned to take {peak} bytes{others}, and the device has {memory} for "
                "this process. Plan with a smaller budget, or keep fewer models there.",
            )

    def _check_outstanding(self, entry: Entry) -> None:
        planned_for = entry.planned.plan.protocol.forwards_outstanding
        if self.outstanding >= planned_for:
            self.warn("outstanding", outstanding_text(self.outstanding + 1, planned_for))

    def warn(self, key: str, message: str, stacklevel: int = 7) -> None:
        """Warn once; 7 frames up is the line that calls the model."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=stacklevel)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Plan again if another optimizer than the assumed one steps; miss training calls."""
        self.stepping.stepped(self, optimizer)
