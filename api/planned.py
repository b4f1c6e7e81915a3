"""What planning yields, and the steps on the way to it that a plan from the cache takes, too."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from remat.ir import Block, Role, Trace
from remat.ir.domain import Domain, find_domain
from remat.passes import (
    Emitted,
    Index,
    Parts,
    Patterns,
    Plan,
    Prepared,
    demands,
    emit_schedule,
    formulate,
    resident_bytes,
    split_joint,
    state_bytes,
)
from remat.passes.eager import EagerStep
from remat.solvers import Problem

from .outstanding import OTHERS, left_bytes
from .program import Interface, Program, interface_of, make_program
from .request import Request, Surroundings


@dataclass(frozen=True, slots=True)
class Details:
    """What it takes to explain a plan, and to plan for other sizes; not to run it."""

    prepared: Prepared
    emitted: Emitted | None
    """None if the original forward runs."""
    around: Surroundings
    eager: EagerStep | None = None
    """The eager step with symbolic sizes, if the plan runs it and sizes are dynamic."""
    baseline: Trace | None = None
    """The eager step; None if the plan is from the cache, so that it was not followed."""
    times: tuple[int, ...] = ()
    """Predicted time of every op of the captured graph, nanoseconds; empty if the plan is from the cache."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it takes to run and to explain it."""

    plan: Plan
    program: Program | None
    """None if the original forward runs."""
    interface: Interface
    trace: Trace
    """The planned step; the eager one if the original forward runs."""
    seconds: Mapping[str, float]
    """Time that each part of planning took."""
    request: Request
    domain: Domain
    """Sizes at which the plan can run."""
    details: Callable[[], Details]
    """Gives the rest; captures the step if the plan was found without that."""
    from_file: bool = False
    """The plan was found in the cache."""

    @property
    def parts(self) -> Parts | None:
        """The graphs that run; None if the original forward runs."""
        return self.program.parts if self.program else None

    @property
    def prepared(self) -> Prepared:
        """The captured step."""
        return self.details().prepared

    @property
    def emitted(self) -> Emitted | None:
        """The plan written out; None if the original forward runs."""
        return self.details().emitted


@dataclass(slots=True)
class Clock:
    """Where planning time goes."""

    report: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    part: str = ""
    since: float = 0.0

    def begin(self, part: str) -> None:
        """Book the time since the last call, and begin the next part."""
        now = time.perf_counter()
        if self.part:
            self.seconds[self.part] = self.seconds.get(self.part, 0.0) + now - self.since
        self.part, self.since = part, now
        if part:
            self.report(part)

    def solving(self, cost: float, bound: float) -> None:
        """Report how far the solver is: overhead found and overhead proven, as fractions of a step."""
        found = "none found" if math.isinf(cost) else f"+{cost:.2%}"
        gap = "" if math.isinf(cost) else f", gap {100 * max(0.0, cost - bound):.2f} points"
        self.report(f"{self.part}: {found}, bound +{bound:.2%}{gap}")


@dataclass(frozen=True, slots=True)
class Step:
    """The step that is to be planned."""

    asked: Request
    """As the user asked for it."""
    request: Request
    """With several forwards outstanding, one backward finds the gradients of another."""
    prepared: Prepared
    beside: Surroundings
    """What is on the device beside parameters, buffers and arguments."""
    around: Surroundings
    """The same, with what the loss needs beside the outputs."""

    @property
    def others(self) -> int:
        """Forwards that are outstanding beside the planned one."""
        return self.request.protocol.forwards_outstanding - 1

    @property
    def resident(self) -> int:
        """Bytes on the device throughout the step."""
        return sum(resident_bytes(self.prepared.graph).values()) + self.around.bytes

    def formulate(
        self, prepared: Prepared, times: Mapping[str, int], patterns: Patterns
    ) -> tuple[Problem, Index]:
        """The problem of the step.

        Args:
            prepared: the step in one order.
            times: of its ops by name, nanoseconds; 0 for those that are absent.
            patterns: to keep to.
        """
        graph, protocol = prepared.graph, self.request.protocol
        return formulate(
            graph,
            [times.get(op.name, 0) for op in graph.ops],
            protocol,
            resident=sum(resident_bytes(graph).values()) + self.around.bytes,
            budget=self.request.budget,
            state_bytes=state_bytes(str(prepared.device)),
            demanded=demands(graph, patterns, protocol),
        )

    def emit(
        self, prepared: Prepared, index: Index, schedule: Sequence[int], others: int = 0
    ) -> Emitted:
        """A schedule as a program.

        Args:
            prepared: the step in one order.
            index: of its problem.
            schedule: problem ops in order of execution.
            others: forwards that are outstanding beside this one.
        """
        blocks = [*self.beside.blocks]
        if others:
            left = others * left_bytes(self.emit(prepared, index, schedule).trace)
            blocks.append(Block(OTHERS, Role.ACTIVATION, sympy.Integer(left), -1, 0))
        return emit_schedule(
            prepared,
            index,
            schedule,
            self.request.protocol,
            extra=blocks,
            optimizer=self.around.optimizer,
        )


def step_of(request: Request, prepared: Prepared, beside: Surroundings) -> Step:
    """The step of a request."""
    around = replace(beside, blocks=(*beside.blocks, *prepared.targets))
    return Step(request, accumulated(request), prepared, beside, around)


def accumulated(request: Request) -> Request:
    """The request; with several forwards outstanding, one backward finds the gradients of another."""
    protocol = request.protocol
    resident = protocol.gradients_resident or protocol.forwards_outstanding > 1
    return replace(request, protocol=replace(protocol, gradients_resident=resident))


def as_it_is(
    step: Step,
    plan: Plan,
    trace: Trace,
    domain: Domain,
    seconds: Mapping[str, float],
    *,
    eager: EagerStep | None = None,
    times: Sequence[int] = (),
) -> Planned:
    """A plan that runs the model as it is.

    Args:
        step: that is planned.
        plan: its plan.
        trace: of the eager step.
        domain: sizes at which it can run.
        seconds: time that each part of planning took.
        eager: see `Details`, likewise `times`.
        times: of ops.
    """
    details = Details(step.prepared, None, step.beside, eager, None, tuple(times))
    interface = interface_of(step.prepared)
    return Planned(plan, None, interface, trace, seconds, step.request, domain, lambda: details)


def runnable(
    step: Step,
    plan: Plan,
    emitted: Emitted,
    seconds: Mapping[str, float],
    *,
    baseline: Trace | None = None,
    times: Sequence[int] = (),
) -> Planned:
    """A plan with the graphs that run it.

    Args:
        step: that is planned.
        plan: its plan.
        emitted: the plan's schedule as a program.
        seconds: time that each part of planning took.
        baseline: see `Details`, likewise `times`.
        times: of ops.
    """
    prepared = step.prepared
    parts = split_joint(emitted.rewritten, prepared.signature)
    domain = find_domain(emitted.rewritten.joint, step.asked.sizes, prepared.capture.symbols)
    details = Details(prepared, emitted, step.beside, None, baseline, tuple(times))
    return Planned(
        plan,
        make_program(parts, prepared, step.request.protocol),
        interface_of(prepared),
        emitted.trace,
        seconds,
        step.request,
        domain,
        lambda: details,
    )
