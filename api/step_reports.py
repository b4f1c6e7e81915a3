"""Step reports: of a plan and of an analysis, from the traces that they rest on."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TYPE_CHECKING

import sympy

from remat.ir import Graph, Op, OutputKind, Phase, Role, Trace
from remat.passes import Emitted, Plan, planned_for_cuda
from remat.passes.formula_text import to_latex, to_text

from .explain import rests_on
from .planned import Planned
from .planner import op_times
from .request import eager_of
from .views.step_report import (
    NOT_NEEDED,
    RECOMPUTED,
    SAVED,
    ExecutedOp,
    FormulaText,
    HeldTensor,
    PlanFigures,
    Point,
    StepReport,
    Timeline,
)

if TYPE_CHECKING:
    from .report import MemoryReport

_EAGER = {
    Role.ACTIVATION: (SAVED, "autograd keeps it for backward"),
    Role.OUTPUT: (SAVED, "an output of the model"),
    Role.TEMPORARY: (NOT_NEEDED, "nothing keeps it for backward"),
}
Decision = tuple[str, str]
"""What becomes of an activation, and why."""


def report_of_plan(planned: Planned, frontier: tuple[Point, ...] = ()) -> StepReport:
    """The step as planned, with the eager one beside it.

    Args:
        planned: the plan; what it was made of is followed again in eager if the plan is from the cache.
        frontier: plans at other budgets.
    """
    plan, request = planned.plan, planned.request
    eager = planned.trace if plan.is_eager else planned.baseline
    eager = eager or eager_of(request, planned.around)
    timeline = _planned_timeline(planned) if planned.emitted else _eager_timeline(eager)
    return StepReport(
        model=type(request.module).__name__,
        device=_target(planned),
        sizes=dict(plan.sizes),
        optimizer=plan.optimizer,
        loss=plan.loss,
        versions=_versions(),
        budget_bytes=plan.budget_bytes,
        timeline=timeline,
        baseline=_eager_timeline(eager) if planned.emitted else None,
        plan=_figures(plan, planned.seconds),
        formulas=(_formula("peak", plan.peak),) if plan.terms else (),
        frontier=frontier,
        notes=tuple(line.strip() for line in rests_on(plan)),
    )


def _target(planned: Planned) -> str:
    """The device that the plan is for; a GPU need not be at hand."""
    request = planned.request
    absent = planned_for_cuda(request.module, request.cost_model)
    return request.cost_model if absent else planned.plan.device


def report_of_analysis(
    report: "MemoryReport", trace: Trace, sizes: Mapping[str, int], step: str
) -> StepReport:
    """The eager step of an analysis.

    Args:
        report: the analysis.
        trace: one of its steps, in numbers.
        sizes: at which it was taken.
        step: which one it is, for people.
    """
    formulas = [_formula("peak", report.peak), _formula("resident", report.resident)]
    formulas += [_formula(phase, found.peak) for phase, found in report.steady.phases.items()]
    formulas.append(_formula("retained activations", report.steady.retained))
    return StepReport(
        model=report.model,
        device=report.device,
        sizes=dict(sizes),
        optimizer=report.optimizer,
        loss="",
        versions=_versions(),
        budget_bytes=None,
        timeline=_eager_timeline(trace),
        baseline=None,
        plan=None,
        formulas=tuple(formulas),
        frontier=(),
        notes=(f"step: {step}; precision: {report.precision}", *report.notes()),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("remat", "torch", "ortools"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # torch built from source, or installed under another name
            continue
    return found


def _formula(name: str, expr: sympy.Expr) -> FormulaText:
    return FormulaText(name, to_text(expr), to_latex(expr))


def _figures(plan: Plan, seconds: Mapping[str, float]) -> PlanFigures:
    ledger = plan.ledger
    return PlanFigures(
        overhead=plan.overhead,
        lower_bound=plan.lower_bound,
        gap=plan.gap,
        status=plan.status.value,
        bound_class=plan.bound_class.value,
        step_time_ns=plan.step_time_ns,
        least_peak_bytes=plan.least_peak_bytes,
        least_peak_bound_bytes=plan.least_peak_bound_bytes,
        ledger={
            "captured": ledger.captured,
            "in order": ledger.ordered,
            "in place": ledger.in_place,
            "planned": ledger.planned,
        }
        if ledger
        else {},
        seconds=dict(seconds),
    )


def _eager_timeline(trace: Trace) -> Timeline:
    """An eager step; nothing is decided there but by autograd."""

    def decided(number: int) -> Decision:
        block = trace.blocks[number]
        if block.birth < 0 or trace.instants[block.birth].phase is not Phase.FORWARD:
            return "", ""
        return _EAGER.get(block.role, ("", ""))

    times = [0] * len(trace.instants)
    return _timeline("eager", trace, {}, times, [decided(i) for i in range(len(trace.blocks))])


def _planned_timeline(planned: Planned) -> Timeline:
    emitted = planned.emitted
    assert emitted is not None
    origins = emitted.rewritten.origins()
    original = planned.prepared.graph
    found = op_times(planned.prepared, planned.request.cost_model)
    known = {op.name: time for op, time in zip(original.ops, found, strict=True)}
    times = [known.get(origins.get(op.name, op.name), 0) for op in emitted.graph.ops]
    border, loss = emitted.graph.border, planned.prepared.loss
    between = [0] * (
        len(loss.trace.instants) if loss else 1
    )  # the loss stands where the border is
    times = [*times[:border], *between, *times[border + 1 :]]
    times += [0] * (len(planned.trace.instants) - len(times))  # the optimizer step
    decisions = _decisions(emitted, original, origins, planned.plan)
    return _timeline("planned", planned.trace, origins, times, decisions, _names(planned))


def _names(planned: Planned) -> dict[int, str]:
    """Storage of the rewritten graph -> the user's name of a parameter, buffer or gradient."""
    assert planned.emitted is not None
    graph, inputs = planned.emitted.graph, planned.prepared.signature.inputs
    names: dict[int, str] = {}
    placeholders: dict[str, str] = {}
    for value, (name, _) in zip(
        graph.inputs, inputs, strict=False
    ):  # constants have no more names
        placeholders[graph.values[value].name] = name
        for storage in graph.values[value].storages:
            names.setdefault(storage, name)
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            name = placeholders.get(output.target, output.target)
            for storage in graph.values[output.value].storages:
                names.setdefault(storage, f"{name}.grad")
    return names


def _timeline(
    program: str,
    trace: Trace,
    origins: Mapping[str, str],
    times: Sequence[int],
    decisions: list[Decision],
    names: Mapping[int, str] = MappingProxyType({}),
) -> Timeline:
    """A trace in numbers as plain rows.

    Args:
        program: "planned" or "eager".
        trace: the step.
        origins: name of every repetition -> name of the op that it repeats.
        times: predicted for each instant, nanoseconds; 0 if unknown.
        decisions: for the first blocks of the trace; the others have none.
        names: of blocks by number, where the trace has others.
    """
    ops = tuple(
        ExecutedOp(
            name=i.name,
            target=i.target,
            phase=i.phase.value,
            repeated=i.name in origins,
            time_ns=time,
            scratch=int(i.scratch),
            module=i.module,
            source=i.source,
        )
        for i, time in zip(trace.instants, times, strict=True)
    )
    tensors = []
    for number, block in enumerate(trace.blocks):
        maker = trace.instants[block.birth] if 0 <= block.birth < len(ops) else None
        decision, reason = decisions[number] if number < len(decisions) else ("", "")
        name = names.get(number, block.name)
        tensors.append(
            HeldTensor(
                name=name,
                role=block.role.value,
                bytes=int(block.size),
                birth=block.birth,
                death=block.death,
                text=block.text,
                op=maker.target if maker else "",
                module=maker.module if maker else _module_of(block.role, name),
                source=maker.source if maker else "",
                decision=decision,
                reason=reason,
                recompute_ns=times[block.birth] if maker and decision else 0,
            )
        )
    return Timeline(program, ops, tuple(tensors))


def _module_of(role: Role, name: str) -> str:
    """The module that a tensor from before the step belongs to; empty if it is none's."""
    if role not in (Role.PARAMETER, Role.BUFFER, Role.GRADIENT):
        return ""
    return name.removesuffix(".grad").rpartition(".")[0]


def _decisions(
    emitted: Emitted, original: Graph, origins: Mapping[str, str], plan: Plan
) -> list[Decision]:
    """What becomes of every storage of the rewritten graph that forward makes, and of its repetitions."""
    graph, border = emitted.graph, emitted.graph.border
    originals = {op.name: op for op in original.ops}
    again = set(origins.values())
    readers = _first_readers(graph)
    # What backward finds in a storage is what was written there last.
    forward = graph.ops[:border]
    writers = {s: op for op in forward for s in (*op.allocates, *op.overwrites)}
    decisions: list[Decision] = [("", "")] * len(graph.storages)
    for number, op in enumerate(graph.ops):
        if number == border:
            continue
        for storage in op.allocates:
            if op.name in origins:
                reader = readers.get(storage)
                text = f"made again for {reader.name}" if reader else "made again"
                decisions[storage] = RECOMPUTED, text
            elif number < border:
                last = writers[storage]
                repeated = last.name in again
                decisions[storage] = _decided(
                    originals.get(last.name), repeated, readers.get(storage), origins, plan
                )
    return decisions


def _first_readers(graph: Graph) -> dict[int, Op]:
    """Storage -> first op of backward that reads it."""
    readers: dict[int, Op] = {}
    for op in graph.ops[graph.border + 1 :]:
        if graph.is_alias(op):
            continue
        for value in op.operands:
            for storage in graph.values[value].storages:
                readers.setdefault(storage, op)
    return readers


def _decided(
    original: Op | None,
    repeated: bool,
    reader: Op | None,
    origins: Mapping[str, str],
    plan: Plan,
) -> Decision:
    """What becomes of what an op of forward writes.

    Args:
        original: the op before rewriting; None for one that only plans have.
        repeated: it is executed again.
        reader: first op of backward that reads the first execution's result.
        origins: repetitions, and what they repeat.
        plan: the plan.
    """
    if reader is None and repeated:
        return RECOMPUTED, "freed after its last use in forward; backward makes it again"
    if reader is None:
        return NOT_NEEDED, "backward does not read it"
    if original is not None and original.pinned:
        return SAVED, f"cannot be computed again: {original.pinned}"
    if repeated:
        return SAVED, f"kept for {reader.name}; freed then, and made again later"
    if reader.name in origins:
        return SAVED, f"recomputation starts from it ({reader.name})"
    demanded = f"; {plan.patterns.named()} is demanded" if plan.patterns.save else ""
    return SAVED, f"kept for {reader.name}: dearer to compute again{demanded}"
