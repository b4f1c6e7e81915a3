"""Dispatch: which training calls run a plan, and when a plan is made.

A training call runs the planned graph within the guards of the plan, and the original forward outside
them, counted. A plan is made on the first training call, or for an example; again when gradients are
resident though it assumed none, when another optimizer than the assumed one steps, and when calls have
changed in a way that another plan can follow (`outside`). Eval mode, `no_grad` and compilers never come
here: they see the original forward.
"""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer

from remat.ir import GuardError, InfeasibleBudgetError, UnsupportedGraphError
from remat.ir.capture import argument_names
from remat.ir.fake import Dynamic
from remat.ir.structure import rebuilder, take_tensors
from remat.passes import Plan

from .explain import explain
from .guards import Call, arguments_of, make_guard
from .kept import Entry, Family, Kept, changing, largest
from .module_state import traced_hooks
from .optimizers import find_optimizer, traits, watch_optimizers
from .options import Options
from .outside import Outside, Remedy
from .planner import Planned, make_plan
from .progress import progress
from .request import Request
from .runtime import run
from .sizes import at_sizes, peak_at, prepared_for, why_not_at
from .stats import Stats

ANEW = 8
"""Plans that are made because calls have changed in kind; further changes fall back."""


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
        self._kept = Kept()
        self._anew = 0
        self._steps_without = 0
        self._unplannable: dict[str, str] = {}
        self._current: Entry | None = None
        self._outstanding = 0
        self._warned: set[str] = set()
        self._assumed: object = None
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: Optimizer | None = None
        watch_optimizers(self)

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
        tensors, pattern = take_tensors(call)
        dynamic = dynamic or (family.dynamic if family else self.options.dynamic) or {}
        request = self._request(model, forward, call, resident, dynamic)
        if hooked := traced_hooks(model):
            self._warn(
                "hooks",
                f"remat: {', '.join(hooked)} have hooks. They run while the plan is made; what they compute "
                "becomes part of the plan, what else they do does not happen in planned steps.",
            )
        known = [entry.planned for entry in family.distinct(resident=False)] if family else []
        with self._original_runs(model), progress() as report:
            planned = make_plan(request, report, prepared_for(request, known))
        if planned.prepared.capture.checkpointed:
            self._warn(
                "checkpoints",
                "remat: the model checkpoints parts of itself (torch.utils.checkpoint). In planned steps "
                "they run once, and the plan decides what is computed again; other calls checkpoint "
                "as before.",
            )
        names = argument_names(forward, pattern, len(tensors)) if dynamic else [""] * len(tensors)
        dims = tuple(frozenset(dynamic.get(name, ())) for name in names)
        guard = make_guard(model, call, planned.prepared, dims)
        entry = Entry(guard, planned, rebuilder(planned.prepared.capture.output_pattern))
        if planned.domain.fixed and not self.stats.plans:
            sizes = ", ".join(f"{name} = {size}" for name, size in planned.domain.fixed.items())
            self._warn(
                "fixed",
                f"remat: the model needs {sizes} as numbers, so the plan holds for these only; other "
                "sizes are planned anew.",
            )
        if self._stepped is not None:  # only now: a plan that failed is asked for again
            self._stepped = None
            self._kept, family = Kept(), None
        family = family or Family(guard, dynamic)
        self._kept.add(family, family.key(tensors, resident), entry)
        self._current = entry
        self.stats.plans += 1
        self._assumed = traits(request.optimizer.instance)
        return entry

    def _request(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        resident: bool,
        dynamic: Dynamic,
    ) -> Request:
        asked = self._stepped or self.options.optimizer
        return Request(
            module=model,
            forward=forward,
            args=call[0],
            kwargs=call[1],
            budget=self.options.budget_bytes(model),
            loss_fn=self.options.loss_fn,
            optimizer=find_optimizer(model, asked),
            protocol=replace(self.options.protocol, gradients_resident=resident),
            cost_model=self.options.device_for_cost(model),
            limits=self.options.limits,
            patterns=self.options.patterns,
            dynamic=dynamic or None,
        )

    @contextlib.contextmanager
    def _original_runs(self, model: nn.Module) -> Iterator[None]:
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
        self.make(model, forward, call, self.options.protocol.gradients_resident)

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
        tensors, pattern = take_tensors(call)
        family, outside = self._kept.serving(tensors, pattern)
        if outside is not None:
            entry = self._plan_for(outside, model, forward, call)
            if entry is None:
                why = self._unplannable.get(outside.why, outside.why)
                return self._fall_back(why, forward, args, kwargs)
        else:
            entry = self._in_family(family, model, forward, call)
        self._current = entry
        self.stats.planned += 1
        self._check_outstanding(entry)
        if entry.planned.program is None:
            return forward(*args, **kwargs)
        primals = entry.guard.primals(tensors)
        return entry.rebuild(run(entry.planned.program, primals, _Frames(weakref.ref(self))))

    def _resident(self, model: nn.Module, family: Family | None) -> bool:
        """Gradients are there when the forward begins, or are to be planned for."""
        if self.options.protocol.gradients_resident:
            return True
        return family.guard.has_gradients() if family else _has_gradients(model)

    def _in_family(
        self, family: Family | None, model: nn.Module, forward: Callable[..., Any], call: Call
    ) -> Entry:
        """The plan for a call that a family covers, made if there is none; no family: the first plan.

        Raises:
            GuardError: it is for new sizes, and the user wants no plans for these.
        """
        tensors, _ = take_tensors(call)
        resident = self._resident(model, family)
        if family is None or self._stepped is not None:
            return self.make(model, forward, call, resident, family)
        found = family.at(tensors, resident)
        if found is not None:
            return found
        known = family.distinct(resident) if family.dynamic else []
        reason = why_not_at(known[0].planned, tensors) if known else ""
        if reason and self.options.on_new_size == "refuse":
            raise _refused(reason)
        entry = self.make(model, forward, call, resident, family)
        if reason:
            self._replanned(reason)
        return entry

    def _plan_for(
        self, outside: Outside, model: nn.Module, forward: Callable[..., Any], call: Call
    ) -> Entry | None:
        """A plan for a call of a new kind; None if it runs the original forward.

        Raises:
            GuardError: it is of new sizes, and the user wants no plans for these.
        """
        sizes = outside.remedy is Remedy.SIZES
        if sizes and self.options.on_new_size == "refuse":
            raise _refused(outside.why)
        known = self._anew >= ANEW or outside.why in self._unplannable
        if outside.remedy is Remedy.NONE or known:
            return None
        self._anew += 1
        try:
            entry = self._at_changing_sizes(model, forward, call) if sizes else None
            entry = entry or self.make(model, forward, call, self._resident(model, None))
        except InfeasibleBudgetError:
            raise
        except Exception as error:  # whatever it is: the call can run as it is
            self._unplannable[outside.why] = (
                f"{outside.why}; that cannot be planned: {type(error).__name__}: {error}"
            )
            return None
        self._replanned(outside.why)
        return entry

    def _at_changing_sizes(
        self, model: nn.Module, forward: Callable[..., Any], call: Call
    ) -> Entry | None:
        """A plan for a call whose sizes differ from those before, and for others; None if there is none."""
        tensors, pattern = take_tensors(call)
        like, resident = self._kept.families[-1], self._resident(model, None)
        dynamic = {} if self.options.dynamic else changing(like, forward, tensors, pattern)
        if not dynamic:
            return None
        at = at_sizes(forward, call, dynamic, largest(like, dynamic, forward, tensors, pattern))
        try:
            self.make(model, forward, at, resident, dynamic=dynamic)
            entry = self._kept.families[-1].at(tensors, resident)
        except (
            UnsupportedGraphError,
            InfeasibleBudgetError,
        ):  # perhaps there is one for this call
            entry = None
        if entry is None and self._kept.families[-1] is not like:
            self._kept.families.pop()
        return entry

    def _replanned(self, reason: str) -> None:
        self.stats.replanned[reason] += 1
        self._warn(
            "replanned",
            f"remat: made another plan: {reason}. Such plans are counted, with their reasons, in "
            "model.remat.stats.replanned.",
        )

    def _fall_back(
        self, why: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stats.fallbacks[why] += 1
        unused = "" if self.stats.planned else " No call has run the plan so far."
        self._warn(
            "fallback",
            f"remat: a training call ran the original forward, without the memory cap: {why}. Such "
            f"calls are counted, with their reasons, in model.remat.stats.fallbacks.{unused}",
        )
        return forward(*args, **kwargs)

    def _check_outstanding(self, entry: Entry) -> None:
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
        """Plan again if this one, not the assumed one, holds the parameters; check that there is a plan."""
        if optimizer in self._seen:
            return
        if self.enabled and not self.stats.planned and not self.stats.fallbacks:
            self._steps_without += 1
            if self._steps_without >= 3:  # fewer may be somebody's warm-up
                self._check_called(optimizer)
        if self._current is None or self.options.optimizer != "auto":
            return
        self._seen.add(optimizer)
        mine = {id(p) for p in self._current.guard.trained()}
        if traits(optimizer) != self._assumed and any(
            id(p) in mine for group in optimizer.param_groups for p in group["params"]
        ):
            self._stepped = optimizer

    def _check_called(self, optimizer: Optimizer) -> None:
        """Warn if the model is trained without a call of the drop-in."""
        model = self.owner()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if model is not None and any(id(p) in held for p in model.parameters()):
            self._warn(
                "never called",
                f"remat: a {type(optimizer).__name__} has updated parameters of the "
                f"{type(model).__name__} that is to be planned, but no training call has come to its "
                "forward, so there is no memory cap. Train through the object that optimize_checkpoints "
                "returned: call it, not its parts, nor the model that it was made of.",
                stacklevel=6,
            )


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

    def held(self, count: int, size: int) -> None:
        if (remat := self.remat()) is not None:
            remat._warn(
                "held",
                f"remat: planned for outputs_held=False, but {count} outputs ({size} bytes) are still held "
                "when backward begins, so the budget may be exceeded. Drop them before backward, or plan "
                "with protocol=StepProtocol(outputs_held=True).",
                stacklevel=10,  # the line that calls backward
            )


def _refused(reason: str) -> GuardError:
    return GuardError(
        f"no plan covers this call: {reason}. Plan for larger sizes, or let more plans be made: "
        'on_new_size="replan".'
    )


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())
