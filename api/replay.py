"""A plan that is known already, put on a captured step again, without solving.

What is taken over is the program: the names of its ops in order of execution. It is checked on the step at
hand (the same ops, every operand there when it is read, the peak within the budget at the sizes of this
step), so a plan of another step is never run; and peak and cost are counted anew. What was proven of the plan
is taken over only if the step costs what it did.
"""

from dataclasses import replace

from remat.ir import VerifyError
from remat.passes import Plan, Prepared, reorder_step
from remat.passes.reorder import must_precede
from remat.solvers import Solution, Status, evaluate

from .orders import Arranged, Formulated, identity_peak


def replayed(plan: Plan, prepared: Prepared, formulated: Formulated) -> Arranged | None:
    """The step in the order of a plan, with the plan's schedule as the one of least peak.

    Args:
        plan: made for the same step, as far as is known.
        prepared: the step, as it was captured.
        formulated: makes the problem of a step.

    Returns:
        None if it is no plan of this step, or does not fit its budget.
    """
    problem, index = formulated(prepared)
    names = [prepared.graph.ops[op].name for op in index.ops]
    steps = plan.steps or tuple(names)
    order = [names.index(name) for name in dict.fromkeys(steps) if name in names]
    if sorted(order) != list(range(len(names))) or set(steps) != set(names):
        return None
    place = {op: i for i, op in enumerate(order)}
    border = index.ops.index(prepared.graph.border)
    if place[border] != border or any(
        place[a] > place[b] for a, b in must_precede(prepared, index)
    ):
        return None
    changed = order != list(range(len(names)))
    step = reorder_step(prepared, index, order) if changed else prepared
    problem, index = formulated(step) if changed else (problem, index)
    number = {step.graph.ops[op].name: i for i, op in enumerate(index.ops)}
    schedule = tuple(number[name] for name in steps)
    try:
        found = evaluate(problem, schedule)
    except VerifyError:
        return None
    if plan.steps and not found.feasible:
        return None
    solution = Solution(
        Status.FEASIBLE, schedule, found.cost, found.peak, 0.0, problem.bound_class
    )
    return Arranged(step, problem, index, identity_peak(problem), solution, changed)


def with_proof(plan: Plan, known: Plan) -> Plan:
    """The plan with what was proven and found when it was solved, if that was the same question."""

    def question(of: Plan) -> tuple[object, ...]:
        return of.budget_bytes, of.baseline_peak_bytes, of.resident_bytes, of.step_time_ns

    if question(plan) != question(known) or plan.steps != known.steps:
        return plan
    return replace(
        plan,
        least_peak_bytes=known.least_peak_bytes,
        least_peak_bound_bytes=known.least_peak_bound_bytes,
        lower_bound=known.lower_bound,
        bound_class=known.bound_class,
        status=known.status,
        ledger=known.ledger,
    )
