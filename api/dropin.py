"""The drop-in: a `GraphModule` that is an instance of the user's class and trains under a plan.

It shares the model's parameters, buffers and submodules. Its forward runs the planned graph when it
trains within the guards of a plan, and the original forward otherwise: in eval mode, under `no_grad`,
inside a compiler, and, counted, outside the guards. All else is the user's class.
"""

import contextlib
import copy
import copyreg
import functools
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from remat.ir import UnsupportedGraphError
from remat.ir.structure import rebuilder, take_tensors
from remat.passes import Plan

from .explain import explain
from .guards import Call, Guard, make_guard, normalize
from .optimizers import find_optimizer
from .options import Options
from .planner import Planned, Request, make_plan
from .progress import progress
from .runtime import run

_TAKEN = ("code", "graph", "meta", "remat")


@dataclass(slots=True)
class Stats:
    """What the calls of a drop-in did."""

    planned: int = 0
    """Training calls that ran a plan (or the original forward, where the plan says so)."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Training calls outside the guards, which ran the original forward, by reason."""
    plans: int = 0
    """Plans that were made."""


@dataclass(frozen=True, slots=True)
class _Entry:
    guard: Guard
    planned: Planned
    rebuild: Callable[[Any], Any]


class Remat:
    """Everything of ours on a drop-in: plan, statistics, explanation, switches."""

    def __init__(self, options: Options) -> None:
        """Start without a plan."""
        self.options = options
        self.stats = Stats()
        self.protocol = options.protocol
        self.enabled = True
        self._entries: dict[bool, _Entry] = {}
        self._current: _Entry | None = None
        self._outstanding = 0
        self._warned: set[str] = set()
        self._stale = False
        self._meta: dict[str, Any] = {}

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
        known = next(iter(self._entries.values()), None)
        protocol = replace(self.protocol, gradients_resident=resident)
        request = Request(
            module=model,
            forward=forward,
            args=call[0],
            kwargs=call[1],
            budget=self.options.budget_bytes(model),
            loss_fn=self.options.loss_fn,
            optimizer=find_optimizer(model, self.options.optimizer),
            protocol=protocol,
            cost_model=self.options.device_for_cost(model),
            limits=self.options.limits,
        )
        with self._original_runs(), progress() as report:
            planned = make_plan(request, report, known.planned.prepared if known else None)
        captured = planned.prepared.capture
        guard = make_guard(model, call, captured.parameters, captured.buffers)
        entry = _Entry(guard, planned, rebuilder(captured.output_pattern))
        self._entries[resident] = entry
        self._current = entry
        self.stats.plans += 1
        self._watch_optimizers(request.optimizer.instance, model)
        return entry

    @contextlib.contextmanager
    def _original_runs(self) -> Iterator[None]:
        """While the model is traced, its forward is the original one."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for example arguments."""
        forward: Callable[..., Any] = type(model)._remat_original.fget(model)  # type: ignore[attr-defined]
        call = normalize(inspect.signature(forward), args, kwargs)
        self.make(model, forward, call, self.protocol.gradients_resident)

    def call(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one training call: by plan within its guards, else by the original forward."""
        call = normalize(inspect.signature(forward), args, kwargs)
        tensors, pattern = take_tensors(call)
        entry = self._current
        if entry is None or self._stale:
            self._stale = False
            self._entries.clear()
            resident = self.protocol.gradients_resident or _has_gradients(model)
            entry = self.make(model, forward, call, resident)
        elif why := entry.guard.why_not(tensors, pattern):
            return self._fall_back(why, forward, args, kwargs)
        resident = entry.guard.has_gradients()
        if resident and not entry.planned.plan.protocol.gradients_resident:
            entry = self._entries.get(True) or self.make(model, forward, call, True)
        self._current = entry
        self.stats.planned += 1
        self._check_outstanding(entry)
        if entry.planned.program is None:
            return forward(*args, **kwargs)
        self._outstanding += 1
        done = functools.partial(_forget_one, weakref.ref(self))
        results = run(entry.planned.program, entry.guard.primals(tensors), done)
        return entry.rebuild(results)

    def _fall_back(
        self, why: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stats.fallbacks[why] += 1
        self._warn(
            why,
            f"remat: a training call ran the original forward, without the memory cap: {why}. Such "
            "calls are counted in model.remat.stats.fallbacks.",
        )
        return forward(*args, **kwargs)

    def _check_outstanding(self, entry: _Entry) -> None:
        planned_for = entry.planned.plan.protocol.forwards_outstanding
        if self._outstanding >= planned_for:
            self._warn(
                "outstanding",
                f"remat: {self._outstanding + 1} forwards are outstanding, planned for {planned_for}; each "
                "keeps its saved activations, so the budget may be exceeded. Pass "
                f"protocol=StepProtocol(forwards_outstanding={self._outstanding + 1}).",
            )

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=6)

    def _watch_optimizers(self, assumed: Optimizer | None, model: nn.Module) -> None:
        """With optimizer="auto": plan again when another optimizer turns out to hold the parameters."""
        if self.options.optimizer != "auto":
            return
        kind = type(assumed)
        mine = {id(p) for p in model.parameters()}
        me = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            remat = me()
            if remat is None:
                handle.remove()
            elif type(optimizer) is not kind and any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            ):
                remat._stale = True
                handle.remove()

        handle = register_optimizer_step_post_hook(stepped)


def _forget_one(remat: "weakref.ref[Remat]") -> None:
    alive = remat()
    if alive is not None:
        alive._outstanding -= 1


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def make_dropin(model: nn.Module, remat: Remat) -> nn.Module:
    """An object of a subclass of the model's class that shares the model's state.

    Raises:
        UnsupportedGraphError: the model has attributes of its own by the names that the drop-in needs.
    """
    base = type(model)
    clash = [name for name in _TAKEN if hasattr(base, name) or name in vars(model)]
    if clash:
        raise UnsupportedGraphError(
            f"{base.__name__} has attributes {clash}, which the optimised model needs for itself. "
            "Rename them, or wrap the model in a module without them."
        )
    instance: Any = object.__new__(_class_for(base, vars(model).get("forward")))
    vars(instance).update({k: v for k, v in vars(model).items() if k != "forward"})
    vars(instance)["remat"] = remat
    assert isinstance(instance, nn.Module)
    return instance


def _class_for(base: type[nn.Module], patched: Callable[..., Any] | None) -> type:
    """The class of a drop-in: the user's, and `GraphModule`, with forward on top."""

    def original(self: Any) -> Callable[..., Any]:
        return patched or functools.partial(base.forward, self)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original(self)
        remat: Remat = vars(self)["remat"]
        planned = self.training and torch.is_grad_enabled() and remat.enabled
        if not planned or torch.compiler.is_compiling():
            return bound(*args, **kwargs)
        return remat.call(self, bound, args, kwargs)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": functools.partialmethod(_reduce, base),
        "_graph": property(_graph),
        "graph": property(_graph),
        "code": property(lambda self: _graph(self).python_code("self").src),
        "meta": property(lambda self: vars(self)["remat"]._meta),
        "recompile": lambda self: None,
        "forward": forward,
        "_remat_base": base,
        "_remat_original": property(original),
    }
    return type(base.__name__, (base, fx.GraphModule), namespace)


def _graph(model: nn.Module) -> fx.Graph:
    planned = vars(model)["remat"].forward_graph
    if planned is not None:
        return planned.graph  # type: ignore[no-any-return]
    empty = fx.Graph()
    empty.output(None)
    return empty


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(model).items() if name != "remat"}


def _reduce(model: nn.Module, base: type, protocol: int) -> tuple[Any, ...]:
    """Pickle as the user's own class, so that a checkpoint loads where remat is not installed."""
    return copyreg._reconstructor, (base, object, None), _state(model)  # type: ignore[attr-defined]


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A drop-in for a copy of the model; it makes its own plan when it trains."""
    base: type = model._remat_base  # type: ignore[assignment]
    twin: Any = object.__new__(base)
    memo[id(model)] = instance = make_dropin(twin, Remat(vars(model)["remat"].options))
    vars(instance).update(copy.deepcopy(_state(model), memo))
    return instance
