"""A graph of Dynamo with its plans: what `torch.compile(..., backend="remat")` puts in place of the graph.

A call runs the plan on the inputs that it gets, never on those that the plan was made for. See `backend` for
when a plan is made.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.ir.structure import rebuilder, take_tensors
from remat.passes import Plan

from .budget import in_units
from .dynamo_graph import (
    BoundGraph,
    broken_at,
    inputs_of,
    share_memory,
)
from .explain import explain
from .inductor import compile_program
from .kept import PLANS
from .optimizers import find_optimizer, traits, watch_optimizers
from .options import Options, check
from .outstanding import held_text, left_bytes, outstanding_text
from .planned import Planned
from .planner import make_plan
from .program import Program
from .progress import progress
from .request import Request
from .runtime import run
from .stepping import Stepping

_live: "weakref.WeakSet[Compiled]" = weakref.WeakSet()


def compiled() -> "list[Compiled]":
    """The planned graphs that Dynamo holds, in the order in which they were compiled."""
    return sorted(_live, key=lambda graph: graph.number)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One plan, without what it was made from."""

    plan: Plan
    text: str
    left: int
    """Bytes that a forward leaves for its backward."""
    program: Program | None
    sources: tuple[int, ...]
    """Per input of the program: which input of Dynamo's graph it is."""
    updated: tuple[int, ...]
    """Inputs of Dynamo's graph that the step updates."""
    rebuild: Callable[[Any], Any]


class Compiled:
    """A graph of Dynamo with its plans."""

    made = 0

    def __init__(
        self, graph: fx.GraphModule, symbolic: bool, options: Options, inductor: bool
    ) -> None:
        """Start without a plan.

        Args:
            graph: as Dynamo gave it.
            symbolic: it holds for several sizes.
            options: what the user asked for.
            inductor: Inductor compiles the planned graphs.
        """
        self.graph = graph
        self.options = options
        self.inductor = inductor
        self.number = Compiled.made = Compiled.made + 1
        self.plans = 0
        """Plans that were made."""
        self.calls = 0
        self._inputs = inputs_of(graph)
        self._symbolic = symbolic
        self._broken = broken_at(graph)
        self._entries: dict[tuple[bool, tuple[object, ...]], _Entry] = {}
        """By whether gradients are resident, and by the sizes if those are symbols."""
        self._current: _Entry | None = None
        self._outstanding = 0
        self._warned: set[str] = set()
        self._trained: list[weakref.ref[nn.Parameter]] = []
        self._stepping = Stepping()
        _live.add(self)

    @property
    def plan(self) -> Plan | None:
        """The plan in use."""
        return self._current.plan if self._current else None

    def explain(self) -> str:
        """What the plan does and what it rests on, as text."""
        return (
            self._current.text if self._current else "No plan yet: it is made at the first call."
        )

    def __call__(self, *inputs: Any) -> Any:
        """Run the plan for these inputs; make it if there is none."""
        entry = self._current = self._entry(inputs)
        self.calls += 1
        self._check_others()
        self._check_outstanding(entry)
        if entry.program is None:
            return self.graph(*inputs)
        if entry.updated and share_memory(entry.updated, inputs):
            self._warn(
                "shared",
                "remat: inputs share memory, and the step updates one in place. Such calls run without "
                "the memory cap.",
            )
            return self.graph(*inputs)
        primals = [inputs[i] for i in entry.sources]
        return entry.rebuild(run(entry.program, primals, _Frames(weakref.ref(self))))

    def _entry(self, inputs: Sequence[Any]) -> _Entry:
        resident = self.options.protocol.gradients_resident or any(
            [isinstance(x, nn.Parameter) and x.grad is not None for x in inputs]
        )
        sizes = tuple(map(_size, inputs)) if self._symbolic else ()
        if self._stepping.other is None:
            # A plan for resident gradients serves where there are none, too.
            found = self._entries.get((resident, sizes)) or self._entries.get((True, sizes))
            if found is not None:
                return found
        return self._make(inputs, resident, sizes)

    def _make(self, inputs: Sequence[Any], resident: bool, sizes: tuple[object, ...]) -> _Entry:
        """Plan for a call, and keep the plan."""
        module = BoundGraph(self.graph, self._inputs, inputs)
        request = self._request(module, inputs, resident)
        if self._broken:
            self._warn_of_break()
        with progress() as report:
            planned = make_plan(request, report)
        if self.inductor and planned.program is not None:
            compile_program(planned.program)
        entry = _entry(planned, module, inputs)
        if self._stepping.other is not None:  # only now: a plan that failed is asked for again
            self._stepping.other = None
            self._entries.clear()
        self._entries[resident, sizes] = entry
        for key in list(self._entries)[:-PLANS]:
            del self._entries[key]
        self.plans += 1
        if self.options.optimizer == "auto":
            self._trained = [weakref.ref(p) for p in module.parameters() if p.requires_grad]
            self._stepping.assumed = traits(request.optimizer.instance)
            watch_optimizers(self)
        return entry

    def _request(self, module: BoundGraph, inputs: Sequence[Any], resident: bool) -> Request:
        trained = any(p.requires_grad for p in module.parameters())
        asked = (self._stepping.other or self.options.optimizer) if trained else None
        options = replace(self.options, optimizer=asked, dynamic=None)
        check(options, module)
        protocol = replace(options.protocol, gradients_resident=resident)
        if self._broken and protocol.gradient_outputs == "auto":
            protocol = replace(protocol, gradient_outputs="all")  # no loss yet
        return Request(
            module=module,
            forward=module.forward,
            args=tuple(inputs[i] for i in module.rest),
            kwargs={},
            budget=options.budget_bytes(module),
            loss_fn=None,
            optimizer=find_optimizer(module, asked),
            protocol=protocol,
            cost_model=options.device_for_cost(module),
            limits=options.limits,
            patterns=options.patterns,
        )

    def _warn_of_break(self) -> None:
        self._warn(
            "break",
            f"remat: Dynamo cuts the step in two at {self._broken}. Each graph is planned alone under the "
            "budget, so the step as a whole may exceed it. fullgraph=True names every such place.",
        )

    def _check_others(self) -> None:
        """Say so if other graphs hold memory that this one's plan does not know of."""
        if "others" in self._warned:
            return
        others = [graph for graph in _live if graph is not self and graph._outstanding]
        if others and not any(graph._broken for graph in others):  # they have said so
            held = sum(g._outstanding * g._current.left for g in others if g._current)
            self._warn(
                "others",
                f"remat: {len(others)} other compiled graphs wait for their backward. Each is planned alone "
                f"under its budget; they hold {in_units(held)} beside their parameters, which this plan does "
                "not count. Compile what calls them all, or count it: StepProtocol(other_bytes=...).",
            )

    def _check_outstanding(self, entry: _Entry) -> None:
        planned_for = entry.plan.protocol.forwards_outstanding
        if self._outstanding >= planned_for:
            self._warn("outstanding", outstanding_text(self._outstanding + 1, planned_for))

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=5)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """With optimizer="auto": plan again if this one, not the assumed one, holds the parameters."""
        if self._current is not None:
            self._stepping.notice(
                optimizer, [p for ref in self._trained if (p := ref()) is not None]
            )


def _entry(planned: Planned, module: BoundGraph, inputs: Sequence[Any]) -> _Entry:
    """What is kept of a plan: nothing that holds the inputs it was made for."""
    interface = planned.interface
    arguments = [inputs[i] for i in module.rest]
    tensors, _ = take_tensors(arguments)
    first = {
        id(value): i for i, value in zip(reversed(module.rest), reversed(arguments), strict=True)
    }
    sources = [module.state[name] for name in (*interface.parameters, *interface.buffers)]
    sources += [first[id(tensor)] for tensor in tensors]
    program = planned.program
    updated = [program.position[name] for name in program.parts.mutations] if program else []
    return _Entry(
        plan=planned.plan,
        text=explain(planned),
        left=left_bytes(planned.trace),
        program=program,
        sources=tuple(sources),
        updated=tuple(sources[i] for i in updated),
        rebuild=rebuilder(interface.output_pattern),
    )


def _size(value: object) -> object:
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, slots=True)
class _Frames:
    """What a compiled graph hears of its forwards; does not keep it alive."""

    owner: "weakref.ref[Compiled]"

    def begun(self) -> None:
        if (owner := self.owner()) is not None:
            owner._outstanding += 1

    def done(self) -> None:
        if (owner := self.owner()) is not None:
            owner._outstanding -= 1

    def held(self, count: int, size: int) -> None:
        if (owner := self.owner()) is not None:
            owner._warn("held", held_text(count, size))

    def given(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Nothing is verified here."""

    def made(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Nothing is verified here."""

    def running(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()
