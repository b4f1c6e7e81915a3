"""From a module and example arguments to a plan and the program that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.ir import PatternError, SolverError, Trace
from remat.ir.domain import Domain, torch_binding
from remat.passes import (
    Emitted,
    Index,
    Patterns,
    Plan,
    Prepared,
    costs,
    device,
    holders,
    live_ranges,
    overwriting_ops,
    planned_for_cuda,
    planned_trace,
    profile,
    repeated_tensors,
    saved_tensors,
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
    Watch,
    least_peak,
    solve_windows,
)

from .cache import cached_plan, keep_plan
from .infeasible import blame, infeasible_error
from .orders import Arranged, arranged, choose, least_bound, least_of, ledger, searched
from .outstanding import left_bytes, solve_reserved, with_others
from .planned import Clock, Planned, Step, as_it_is, runnable, step_of
from .replay import replayed, with_proof
from .request import Request, beside_eager, eager_of, prepare, surroundings, symbolic_eager
from .starts import keep_start, resumed, start_of

Recall = Callable[[Prepared], Plan | None]
"""Gives a plan that may be for a captured step, as another rank has made it."""


def make_plan(
    request: Request,
    report: Callable[[str], None] = lambda part: None,
    prepared: Prepared | None = None,
    recall: Recall | None = None,
) -> Planned:
    """Plan one training step, or find its plan in the cache.

    Args:
        request: what is asked for.
        report: called with the name of each part of planning as it begins.
        prepared: the captured step, if it is known from an earlier plan of the same call.
        recall: if its plan is for this step, and fits, nothing is solved.

    Raises:
        InfeasibleBudgetError: no plan fits; names the least peak.
        PatternError: a pattern matches nothing, or cannot be kept.
        UnsupportedGraphError: the model cannot be captured.
    """
    clock = Clock(report)
    start = None
    if prepared is None and recall is None:
        clock.begin("cache")
        start = start_of(request)
        if start and (found := resumed(start, clock)):
            return found
    clock.begin("capture")
    prepared = prepared or prepare(request)
    clock.begin("eager trace")
    step = step_of(request, prepared, surroundings(request, prepared))
    known = recall(prepared) if recall else None
    if request.cache_dir is None:
        return _new_plan(step, clock, known)
    clock.begin("cache")
    found, kept = cached_plan(step, request.cache_dir, clock), True
    if found is None:
        found = _new_plan(step, clock, known)
        kept = keep_plan(step, request.cache_dir, found)
    if start and kept:
        keep_start(start, found)
    return found


def _new_plan(step: Step, clock: Clock, known: Plan | None) -> Planned:
    """Find a plan; the known one if it is one of this step."""
    request, prepared, others = step.request, step.prepared, step.others
    clock.begin("eager trace")
    eager = eager_of(request, step.beside)
    baseline = profile(eager).peak + others * left_bytes(eager)
    clock.begin("capture")
    times = op_times(prepared, request.cost_model)
    by_name = {op.name: time for op, time in zip(prepared.graph.ops, times, strict=True)}
    clock.begin("least peak")

    def formulated(
        arranged: Prepared, patterns: Patterns = request.patterns
    ) -> tuple[Problem, Index]:
        return step.formulate(arranged, by_name, patterns)

    brief = replace(request.limits, time_s=request.limits.time_s / 6)
    if known and known.is_eager and request.budget < baseline:
        known = None
    again = replayed(known, prepared, formulated) if known else None
    known = known if again else None
    candidates = [again] if again else arranged(prepared, formulated, brief)
    short = request.budget < least_of(candidates).least.peak
    if short and not again:  # look harder before giving up
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
    optimizer_peak = peak_of_optimizer(step)
    least_peak_bytes = max(least.peak, optimizer_peak)
    if others:
        least_peak_bytes = profile(_emitted(step, tightest, least.schedule, others).trace).peak
    # Eager keeps what it computes, or recomputes by itself.
    only_planned = bool(request.patterns.recompute) or prepared.capture.checkpointed
    least_bytes = least_peak_bytes if only_planned else min(baseline, least_peak_bytes)
    bound_bytes = min(least_bytes, max(optimizer_peak, least_bound(candidates)))
    beforehand = profile(eager).resident
    figures = _Figures(step, baseline, beforehand, least_bytes, bound_bytes, tuple(times))
    if request.budget >= baseline and not only_planned:
        clock.begin("")
        return _eager_plan(figures, eager, clock, known)
    if request.budget < least_bytes and again:  # it fits no more with all that is beside the step
        return _new_plan(step, clock, None)
    if request.budget < least_bytes:
        trace = _emitted(step, tightest, least.schedule, others).trace
        raise infeasible_error(request.budget, least_bytes, trace, blamed(), bound_bytes)
    clock.begin("solve")
    chosen = tightest if others else choose(candidates)
    solution = again.least if again else _solved(step, chosen, clock.solving)
    clock.begin("rewrite")
    best = _emitted(step, chosen, solution.schedule, others)
    kept = others * left_bytes(_emitted(step, chosen, solution.schedule).trace) if others else 0
    plan = _plan(figures, solution, best)
    plan = replace(
        plan,
        reordered=chosen.changed,
        ledger=ledger(candidates[0], chosen, plan.peak_bytes, optimizer_peak, kept),
    )
    plan = with_proof(plan, known) if known else plan
    if plan.peak_bytes > request.budget:
        raise SolverError(
            f"the rewritten step peaks at {plan.peak_bytes} bytes, over the budget of "
            f"{request.budget}: the solver's model and the program disagree. This is a defect of "
            "remat; please report it with the model."
        )
    made = runnable(step, plan, best, clock.seconds, baseline=eager, times=times)
    symbolic = symbolic_step(best, made.domain).trace if made.domain.symbols else None
    plan = _with_sizes(plan, made.domain, symbolic, others)
    made = replace(made, plan=plan)
    clock.begin("")
    return made


def _eager_plan(figures: "_Figures", eager: Trace, clock: Clock, known: Plan | None) -> Planned:
    """The plan that runs the model as it is."""
    step = figures.step
    asked = step.asked
    symbolic = symbolic_eager(asked) if asked.dynamic else None
    domain = symbolic.domain if symbolic else Domain(asked.sizes, asked.sizes, ())
    trace = beside_eager(_fitted(symbolic), step.beside) if symbolic else None
    plan = _with_sizes(_plan(figures, None, None), domain, trace, step.others)
    plan = with_proof(plan, known) if known else plan
    return as_it_is(step, plan, eager, domain, clock.seconds, eager=symbolic, times=figures.times)


def _emitted(step: Step, order: Arranged, schedule: Sequence[int], others: int = 0) -> Emitted:
    return step.emit(order.prepared, order.index, schedule, others)


def _solved(step: Step, chosen: Arranged, watch: Watch) -> Solution:
    """The cheapest schedule in the chosen order that fits the budget."""
    limits, budget = step.request.limits, step.request.budget

    def solve(budget: int) -> Solution:
        capped = replace(chosen.problem, budget=budget)
        return solve_windows(capped, limits, start=chosen.least.schedule, watch=watch)

    def left(solution: Solution) -> int:
        return step.others * left_bytes(_emitted(step, chosen, solution.schedule).trace)

    if not step.others:
        return solve(budget)
    return solve_reserved(solve, left, chosen.least, budget)


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


def peak_of_optimizer(step: Step) -> int:
    """Peak of the optimizer step, which no plan can change."""
    graph, around = step.prepared.graph, step.around
    ranges = live_ranges(graph, holders(graph, step.request.protocol, {}))
    found = profile(whole_step(planned_trace(graph, ranges), around.blocks, around.optimizer))
    return max(found.bytes[len(graph.ops) :], default=0)


def times_of(planned: Planned) -> Sequence[int]:
    """Time of every op of the captured graph as the plan was made with, nanoseconds."""
    return planned.details().times or op_times(planned.prepared, planned.request.cost_model)


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


@dataclass(frozen=True, slots=True)
class _Figures:
    step: Step
    baseline: int
    beforehand: int
    """Bytes on the device before the step, if eager runs it: constants of the graph are not there."""
    least: int
    least_bound: int
    times: tuple[int, ...]
    """Of the ops, nanoseconds."""


def _plan(figures: _Figures, solution: Solution | None, emitted: Emitted | None) -> Plan:
    """The plan with its figures; without a solution, the one that runs the model as it is."""
    request, prepared = figures.step.request, figures.step.prepared
    time = sum(figures.times)
    base = max(1, time)
    absent = planned_for_cuda(request.module, request.cost_model)
    return Plan(
        steps=emitted.steps if emitted else (),
        stage_ends=emitted.stage_ends if emitted else (),
        protocol=figures.step.asked.protocol,
        device=request.cost_model if absent else str(prepared.device),
        cost_model=request.cost_model,
        optimizer=request.optimizer.how,
        loss=_where_is_loss(figures.step),
        route=prepared.capture.route,
        budget_bytes=request.budget,
        peak_bytes=profile(emitted.trace).peak if emitted else figures.baseline,
        resident_bytes=figures.step.resident if emitted else figures.beforehand,
        baseline_peak_bytes=figures.baseline,
        least_peak_bytes=figures.least,
        least_peak_bound_bytes=figures.least_bound,
        step_time_ns=time,
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


def _where_is_loss(step: Step) -> str:
    if step.request.loss_fn is not None:
        return "traced with the model"
    captured = step.prepared.capture
    scalar = any(captured.results()[i].dim() == 0 for i in captured.gradient_outputs)
    return "inside the model" if scalar else "outside, not counted"
