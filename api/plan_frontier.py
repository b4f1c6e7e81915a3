"""Overhead against budget: the same captured step, solved at budgets from its least peak to eager's.

At each budget the order of first executions is chosen as for a plan. Schedules are evaluated, not written
out, so a point takes a solve and nothing else.
"""

from collections.abc import Callable
from dataclasses import replace

from remat.passes import Index, Prepared
from remat.solvers import Limits, Problem, Solution, solve_windows

from .orders import arranged, choose, least_of
from .planned import Planned, step_of
from .planner import peak_of_optimizer, times_of
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

    Raises:
        ValueError: fewer than two budgets, or several forwards are outstanding: what the others leave
            depends on the plan.
    """
    request, prepared = planned.request, planned.prepared
    if count < 2:
        raise ValueError(f"count must be at least 2, not {count}")
    if request.protocol.forwards_outstanding > 1:
        raise ValueError("budgets are compared for one forward: forwards_outstanding must be 1")
    step = step_of(request, prepared, planned.details().around)
    times = times_of(planned)
    by_name = {op.name: t for op, t in zip(prepared.graph.ops, times, strict=True)}

    def formulated(ordered: Prepared) -> tuple[Problem, Index]:
        return step.formulate(ordered, by_name, request.patterns)

    limits, least_step = Limits(time_limit_s, request.limits.gap), peak_of_optimizer(step)
    report("frontier: least peak")
    candidates = arranged(prepared, formulated, limits)
    low = max(least_of(candidates).least.peak, least_step)
    high = max(planned.plan.baseline_peak_bytes, low)
    base = max(1, sum(times))
    points: list[Point] = []
    solutions: list[Solution] = []
    for number in range(count):
        report(f"frontier: {number + 1} of {count}")
        budget = low + (high - low) * number // (count - 1)
        within = [replace(c, problem=replace(c.problem, budget=budget)) for c in candidates]
        chosen = choose(within)
        solution = solve_windows(chosen.problem, limits, start=chosen.least.schedule)
        # What fits a smaller budget fits this one, too.
        if solutions and solution.cost > solutions[-1].cost:
            solution = replace(solutions[-1], bound=solution.bound)
        solutions.append(solution)
        points.append(
            Point(
                budget_bytes=budget,
                peak_bytes=max(solution.peak, least_step),
                overhead=solution.cost / base,
                lower_bound=max(0.0, solution.bound) / base,
            )
        )
    return tuple(points)
