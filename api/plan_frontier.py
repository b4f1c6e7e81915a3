"""Overhead against budget: the same captured step, solved at budgets from its least peak to eager's.

The order of first executions is that of the plan. Schedules are evaluated, not written out, so a point takes
a solve and nothing else; of several forwards that are outstanding, what the others leave is not counted.
"""

from collections.abc import Callable
from dataclasses import replace

from remat.solvers import Limits, least_peak, solve_windows

from .planned import Planned, step_of
from .planner import op_times, peak_of_optimizer
from .views.step_report import Point


def plan_frontier(
    planned: Planned,
    count: int = 6,
    time_limit_s: float = 10.0,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Point, ...]:
    """The cheapest plans at several budgets, the smallest budget first.

    Args:
        planned: a plan of the step, or of the step as it is.
        count: of budgets, at least 2.
        time_limit_s: of each point.
        report: called with the number of each point as it begins.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, not {count}")
    request, plan = planned.request, planned.plan
    step = step_of(request, planned.prepared, planned.around)
    arranged = planned.emitted.prepared if planned.emitted else planned.prepared
    found = op_times(planned.prepared, request.cost_model)
    times = {op.name: t for op, t in zip(planned.prepared.graph.ops, found, strict=True)}
    costs = [times.get(op.name, 0) for op in arranged.graph.ops]
    problem, _ = step.formulate(arranged, costs, request.patterns)
    limits, least_step = Limits(time_limit_s, request.limits.gap), peak_of_optimizer(step)
    least = least_peak(problem, limits)
    low, high = max(least.peak, least_step), max(plan.baseline_peak_bytes, least.peak)
    base = max(1, sum(found))
    points = []
    for number in range(count):
        report(f"frontier: {number + 1} of {count}")
        budget = low + (high - low) * number // (count - 1)
        solution = solve_windows(replace(problem, budget=budget), limits, start=least.schedule)
        points.append(
            Point(
                budget_bytes=budget,
                peak_bytes=max(solution.peak, least_step),
                overhead=solution.cost / base,
                lower_bound=max(0.0, solution.bound) / base,
            )
        )
    return tuple(points)
