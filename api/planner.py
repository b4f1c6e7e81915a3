"""From a module and example arguments to a plan and the program that runs it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from remat.ir import Block, PatternError, Role, SolverError, Trace
from remat.ir.domain import Domain, find_domain, torch_binding
from remat.passes import (
    Emitted,
    Index,
    Parts,
    Patterns,
    Plan,
    Prepared,
    costs,
    demands,
    device,
    emit_schedule,
    formulate,
    holders,
    live_ranges,
    overwriting_ops,
    planned_trace,
    profile,
    repeated_tensors,
    resident_bytes,
    saved_tensors,
    split_joint,
    state_bytes,
    timed_costs,
    whole_step,
)
from remat.passes.eager import EagerStep, with_scratch
from remat.passes.formula import formula
from remat.passes.scratch_fit import fit_scratch
from remat.passes.symbolic import symbolic_step
from remat.solvers import (
    FORBIDDEN,
    BoundClass,
    Problem,
    Solution,
    Status,
    least_peak,
    solve_windows,
)

from .infeasible import blame, infeasible_error
from .orders import Arranged, arranged, choose, least_bound, least_of, ledger, searched
from .outstanding import OTHERS, left_bytes, solve_reserved, with_others
from .program import Program, make_program
from .request import (
    Request,
    Surroundings,
    beside_eager,
    eager_of,
    prepare,
    surroundings,
    symbolic_eager,
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it takes to run and to explain it."""

    plan: Plan
    program: Program | None
    """None if the original forward runs, likewise `parts` and `emitted`."""
    parts: Parts | None
    prepared: Prepared
    emitted: Emitted | None
    trace: Trace
    """The planned step; the eager one if the original forward runs."""
    seconds: Mapping[str, float]
    """Time that each part of planning took."""
    request: Request
    around: Surroundings
    domain: Domain
    """Sizes at which the plan can run."""
    eager: EagerStep | None
    """The eager step with symbolic sizes, if the plan runs it and sizes are dynamic."""


@dataclass(slots=True)
class _Clock:
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


def make_plan(
    request: Request,
    report: Callable[[str], None] = lambda part: None,
    prepared: Prepared | None = None,
) -> Planned:
    """Plan one training step.

    Args:
        request: what is asked for.
        report: called with the name of each part of planning as it begins.
        prepared: the captured step, if it is known from an earlier plan of the same call.

    Raises:
        InfeasibleBudgetError: no plan fits; names the least peak.
        PatternError: a pattern matches nothing, or cannot be kept.
        UnsupportedGraphError: the model cannot be captured.
    """
    clock = _Clock(report)
    clock.begin("capture")
    prepared = prepared or prepare(request)
    clock.begin("eager trace")
    around = surroundings(request, prepared)
    asked, request = request, _with_accumulation(request)
    eager = eager_of(request, around)
    beside = around
    around = replace(around, blocks=(*around.blocks, *prepared.targets))
    others = request.protocol.forwards_outstanding - 1
    baseline = profile(eager).peak + others * left_bytes(eager)
    clock.begin("capture")
    times = op_times(prepared, request.cost_model)
    by_name = {op.name: time for op, time in zip(prepared.graph.ops, times, strict=True)}
    clock.begin("least peak")

    def formulated(step: Prepared, patterns: Patterns = request.patterns) -> tuple[Problem, Index]:
        costs = [by_name.get(op.name, 0) for op in step.graph.ops]
        return _formulate(replace(request, patterns=patterns), step, around, costs)

    brief = replace(request.limits, time_s=request.limits.time_s / 6)
    candidates = arranged(prepared, formulated, brief)
    if request.budget < least_of(candidates).least.peak:  # look harder before giving up
        longer = replace(request.limits, time_s=request.limits.time_s / 2)
        candidates = searched(candidates, longer)
    tightest = least_of(candidates)
    least = tightest.least

    def least_under(patterns: Patterns) -> int:
        problems = [formulated(candidate.prepared, patterns)[0] for candidate in candidates]
        return min(least_peak(problem, brief).peak for problem in problems)

    def blamed() -> str:
        return blame(request.patterns, request.budget, least_under)

    if least.peak >= FORBIDDEN:
        raise PatternError(f"no budget lets a plan keep to the patterns. {blamed()}")

    def emitted(step: Arranged, schedule: Sequence[int], others: int = 0) -> Emitted:
        blocks = [*beside.blocks]
        if others:
            left = others * left_bytes(emitted(step, schedule).trace)
            blocks.append(Block(OTHERS, Role.ACTIVATION, sympy.Integer(left), -1, 0))
        return emit_schedule(
            step.prepared,
            step.index,
            schedule,
            request.protocol,
            extra=blocks,
            optimizer=around.optimizer,
        )

    optimizer_peak = _optimizer_peak(prepared, request, around)
    least_peak_bytes = max(least.peak, optimizer_peak)
    if others:
        least_peak_bytes = profile(emitted(tightest, least.schedule, others).trace).peak
    # Eager keeps what it computes, or recomputes by itself.
    only_planned = bool(request.patterns.recompute) or prepared.capture.checkpointed
    least_bytes = least_peak_bytes if only_planned else min(baseline, least_peak_bytes)
    bound_bytes = min(least_bytes, max(optimizer_peak, least_bound(candidates)))
    beforehand = profile(eager).resident
    figures = _Figures(
        asked, prepared, around, baseline, beforehand, least_bytes, bound_bytes, sum(times)
    )
    if request.budget >= baseline and not only_planned:
        clock.begin("")
        step = symbolic_eager(asked) if asked.dynamic else None
        domain = step.domain if step else Domain(asked.sizes, asked.sizes, ())
        trace = beside_eager(_fitted(step), beside) if step else None
        plan = _with_sizes(_plan(figures, None, None), domain, trace, others)
        return Planned(
            plan, None, None, prepared, None, eager, clock.seconds, request, beside, domain, step
        )
    if request.budget < least_bytes:
        trace = emitted(tightest, least.schedule, others).trace
        raise infeasible_error(request.budget, least_bytes, trace, blamed(), bound_bytes)
    clock.begin("solve")
    chosen = tightest if others else choose(candidates)

    def solve(budget: int) -> Solution:
        capped = replace(chosen.problem, budget=budget)
        return solve_windows(capped, request.limits, start=chosen.least.schedule)

    def left(solution: Solution) -> int:
        return others * left_bytes(emitted(chosen, solution.schedule).trace)

    budget = request.budget
    solution = solve_reserved(solve, left, chosen.least, budget) if others else solve(budget)
    clock.begin("rewrite")
    best = emitted(chosen, solution.schedule, others)
    kept = left(solution) if others else 0
    plan = _plan(figures, solution, best)
    plan = replace(
        plan,
        reordered=chosen.changed,
        ledger=ledger(candidates[0], chosen, plan.peak_bytes, optimizer_peak, kept),
    )
    if plan.peak_bytes > request.budget:
        raise SolverError(
            f"the rewritten step peaks at {plan.peak_bytes} bytes, over the budget of "
            f"{request.budget}: the solver's model and the program disagree. This is a defect of "
            "remat; please report it with the model."
        )
    parts = split_joint(best.rewritten, prepared.signature)
    program = make_program(parts, prepared, request.protocol)
    captured = prepared.capture
    domain = find_domain(best.rewritten.joint, asked.sizes, captured.symbols)
    symbolic = symbolic_step(best, domain).trace if domain.symbols else None
    plan = _with_sizes(plan, domain, symbolic, others)
    clock.begin("")
    return Planned(
        plan,
        program,
        parts,
        prepared,
        best,
        best.trace,
        clock.seconds,
        request,
        beside,
        domain,
        None,
    )


def _with_sizes(plan: Plan, domain: Domain, trace: Trace | None, others: int) -> Plan:
    """The plan with what is known of it at other sizes.

    Args:
        plan: made at one size.
        domain: where it can run.
        trace: of its step, with symbols; None if there are none.
        others: forwards that are outstanding beside the planned one.
    """
    found = formula(with_others(trace, others)).terms if trace else ()
    return replace(
        plan,
        sizes=domain.example,
        fixed=domain.fixed,
        domain=domain.text(),
        terms=tuple(str(term.expr) for term in found),
    )


def _fitted(step: EagerStep) -> Trace:
    """The eager step with scratch as formulas."""
    domain = step.domain
    return with_scratch(step.trace, fit_scratch(step.calls, domain.symbols, domain.conditions))


def _optimizer_peak(prepared: Prepared, request: Request, around: Surroundings) -> int:
    """Peak of the optimizer step, which no plan can change."""
    graph = prepared.graph
    ranges = live_ranges(graph, holders(graph, request.protocol, {}))
    found = profile(whole_step(planned_trace(graph, ranges), around.blocks, around.optimizer))
    return max(found.bytes[len(graph.ops) :], default=0)


def _with_accumulation(request: Request) -> Request:
    """With several forwards outstanding, one backward finds the gradients of another."""
    protocol = request.protocol
    resident = protocol.gradients_resident or protocol.forwards_outstanding > 1
    return replace(request, protocol=replace(protocol, gradients_resident=resident))


def op_times(prepared: Prepared, cost_model: str) -> list[int]:
    """Time of every op of the graph, nanoseconds."""
    nodes = {node.name: node for node in prepared.capture.joint.graph.nodes}
    ops = [nodes[op.name] for op in prepared.graph.ops if op.name in nodes]
    captured = prepared.capture
    binding = torch_binding(captured.joint, prepared.sizes, captured.symbols)
    if cost_model == "timed":
        found = timed_costs(ops, binding)
    else:
        found = costs(ops, device(cost_model), binding)
    times = {node.name: cost.time_ns for node, cost in zip(ops, found, strict=True)}
    return [times.get(op.name, 0) for op in prepared.graph.ops]


def _formulate(
    request: Request, prepared: Prepared, around: Surroundings, times: Sequence[int]
) -> tuple[Problem, Index]:
    return formulate(
        prepared.graph,
        times,
        request.protocol,
        resident=sum(resident_bytes(prepared.graph).values()) + around.bytes,
        budget=request.budget,
        state_bytes=state_bytes(str(prepared.device)),
        demanded=demands(prepared.graph, request.patterns, request.protocol),
    )


@dataclass(frozen=True, slots=True)
class _Figures:
    request: Request
    prepared: Prepared
    around: Surroundings
    baseline: int
    beforehand: int
    """Bytes on the device before the step, if eager runs it: constants of the graph are not there."""
    least: int
    least_bound: int
    step_time_ns: int


def _plan(figures: _Figures, solution: Solution | None, emitted: Emitted | None) -> Plan:
    """The plan with its figures; without a solution, the one that runs the model as it is."""
    request, prepared = figures.request, figures.prepared
    base = max(1, figures.step_time_ns)
    resident = sum(resident_bytes(prepared.graph).values()) + figures.around.bytes
    return Plan(
        steps=emitted.steps if emitted else (),
        stage_ends=emitted.stage_ends if emitted else (),
        protocol=request.protocol,
        device=str(prepared.device),
        cost_model=request.cost_model,
        optimizer=request.optimizer.how,
        loss=_where_is_loss(figures),
        route=prepared.capture.route,
        budget_bytes=request.budget,
        peak_bytes=profile(emitted.trace).peak if emitted else figures.baseline,
        resident_bytes=resident if emitted else figures.beforehand,
        baseline_peak_bytes=figures.baseline,
        least_peak_bytes=figures.least,
        least_peak_bound_bytes=figures.least_bound,
        step_time_ns=figures.step_time_ns,
        overhead=solution.cost / base if solution else 0.0,
        lower_bound=max(0.0, solution.bound) / base if solution else 0.0,
        bound_class=solution.bound_class if solution else BoundClass.FIXED_ORDER,
        status=solution.status if solution else Status.OPTIMAL,
        saved=saved_tensors(emitted) if emitted else (),
        recomputed=repeated_tensors(emitted) if emitted else (),
        reused=overwriting_ops(emitted) if emitted else (),
        unmeasured=prepared.unmeasured,
        patterns=request.patterns,
        reordered=False,
        ledger=None,
    )


def _where_is_loss(figures: _Figures) -> str:
    if figures.request.loss_fn is not None:
        return "traced with the model"
    scalar = any(
        figures.prepared.capture.results()[i].dim() == 0
        for i in figures.prepared.capture.gradient_outputs
    )
    return "inside the model" if scalar else "outside, not counted"
