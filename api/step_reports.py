"""Step reports: of a plan and of an analysis, from the traces that they rest on."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import sympy

from remat.ir import Block, Phase, Role, Trace
from remat.passes import Plan
from remat.passes.formula_text import to_latex, to_text

from .explain import rests_on
from .outstanding import with_others
from .planned import Planned
from .planned_tensors import Decision, planned_tensors, tensor_of
from .planner import times_of
from .request import eager_of
from .views.step_report import (
    SAVED,
    ExecutedOp,
    FormulaText,
    PlanFigures,
    Point,
    StepReport,
    Timeline,
)

if TYPE_CHECKING:
    from .report import MemoryReport

_EAGER = {
    Role.ACTIVATION: (SAVED, "autograd keeps it for backward"),
    Role.OUTPUT: ("", "an output of the model"),
    Role.TEMPORARY: ("", "nothing keeps it for backward"),
}
"""What autograd does with what forward makes. The model's own checkpoints make some of it again."""


def report_of_plan(planned: Planned, frontier: tuple[Point, ...] = ()) -> StepReport:
    """The step as planned, with the eager one beside it.

    Args:
        planned: the plan; what it was made of is followed again in eager if the plan is from the cache.
        frontier: plans at other budgets.
    """
    plan, request = planned.plan, planned.request
    eager = planned.trace if plan.is_eager else planned.details().baseline
    eager = eager or eager_of(request, planned.details().around)
    eager = with_others(eager, request.protocol.forwards_outstanding - 1)
    timeline = _planned_timeline(planned) if planned.emitted else _eager_timeline(eager)
    return StepReport(
        model=type(request.module).__name__,
        device=plan.device,
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

    def decided(block: Block) -> Decision:
        if block.birth < 0 or trace.instants[block.birth].phase is not Phase.FORWARD:
            return "", ""
        return _EAGER.get(block.role, ("", ""))

    ops = _ops(trace, {}, [0] * len(trace.instants))
    tensors = (tensor_of(block, trace, decided(block)) for block in trace.blocks)
    return Timeline("eager", ops, tuple(tensors))


def _planned_timeline(planned: Planned) -> Timeline:
    emitted, trace = planned.emitted, planned.trace
    assert emitted is not None
    origins = emitted.rewritten.origins()
    original = planned.prepared.graph
    known = {op.name: t for op, t in zip(original.ops, times_of(planned), strict=True)}
    times = [known.get(origins.get(op.name, op.name), 0) for op in emitted.graph.ops]
    border, loss = emitted.graph.border, planned.prepared.loss
    between = [0] * (len(loss.trace.instants) if loss else 1)  # the loss is at the border
    times = [*times[:border], *between, *times[border + 1 :]]
    times += [0] * (len(trace.instants) - len(times))  # the optimizer step
    ops = _ops(trace, origins, times)
    return Timeline("planned", ops, planned_tensors(planned, times))


def _ops(trace: Trace, origins: Mapping[str, str], times: Sequence[int]) -> tuple[ExecutedOp, ...]:
    """The instants of a trace in numbers as plain rows.

    Args:
        trace: the step.
        origins: name of every repetition -> name of the op that it repeats.
        times: predicted for each instant, nanoseconds; 0 if unknown.
    """
    return tuple(
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
