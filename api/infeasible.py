"""The message for a budget that no plan meets: what the least peak is, where, and what fills it."""

from collections.abc import Callable

from remat.ir import InfeasibleBudgetError, Phase, Role, Trace
from remat.passes import Patterns, alive_at, profile

from .budget import in_units
from .request import BESIDE

_STATES = (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE)


def blame(patterns: Patterns, budget: int, least_under: Callable[[Patterns], int]) -> str:
    """Which patterns are in the way of a budget, in a sentence; empty if it cannot be met without any either.

    Args:
        patterns: what the user demands.
        budget: bytes asked for.
        least_under: the least peak under other patterns, bytes.
    """
    if patterns == Patterns() or least_under(Patterns()) > budget:
        return ""
    alone = [name for name, rest in patterns.each_left_out() if least_under(rest) <= budget]
    if alone:
        one = "it" if len(alone) == 1 else "one of them"
        return f"In the way: {' or '.join(alone)}; without {one} a plan fits."
    return f"In the way: {patterns.named()}; without all of them a plan fits."


def infeasible_error(
    budget: int, least: int, trace: Trace, blamed: str = "", bound: int = 0
) -> InfeasibleBudgetError:
    """Explain why `budget` cannot be met.

    Args:
        budget: bytes asked for.
        least: the least peak for which a plan was found, bytes.
        trace: the step of that plan.
        blamed: which of the user's patterns are in the way; see `blame`.
        bound: bytes that no plan can avoid.
    """
    doubt = ""
    if budget >= bound:
        doubt = (
            f", as far as was found: none can be below {bound} bytes, and a longer time_limit_s may "
            "find one between"
        )
    found = profile(trace)
    at = found.peak_instant
    instant = trace.instants[at]
    held: dict[str, int] = {}
    for block in alive_at(trace, at):
        what = "what is beside the model" if block.name == BESIDE else block.role
        held[what] = held.get(what, 0) + int(block.size)
    parts = sorted(((size, role) for role, size in held.items() if size), reverse=True)
    filling = ", ".join(f"{role} {in_units(size)}" for size, role in parts)
    scratch = f", scratch {in_units(int(instant.scratch))}" if instant.scratch else ""
    where = f"{instant.target} in {instant.phase}"
    where += f", {instant.module}" if instant.module else ""
    where += f" ({instant.source})" if instant.source else ""
    helps = _what_helps(found.resident, budget, trace, instant.phase)
    return InfeasibleBudgetError(
        f"no plan fits a budget of {budget} bytes ({in_units(budget)}){doubt}.\n"
        f"  least feasible peak: {least} bytes ({in_units(least)})\n"
        f"  reached at: {where}\n"
        f"  filled by: {filling}{scratch}\n"
        f"{blamed + chr(10) if blamed else ''}{helps} A budget of '{least}B' is feasible.",
        budget_bytes=budget,
        least_peak_bytes=least,
    )


def _what_helps(resident: int, budget: int, trace: Trace, peak_in: Phase) -> str:
    before = [block.role for block in trace.blocks if block.birth < 0]
    optimizer = Role.OPTIMIZER_STATE in before
    lighter = "an optimizer with less state, " if optimizer else ""
    if resident > budget:
        helps = (
            "Model states alone fill the budget; checkpointing cannot help there. Parameters in lower "
            f"precision, {lighter}or sharding would."
        )
    elif peak_in is Phase.OPTIMIZER:
        helps = "The peak is in the optimizer step, where an optimizer that takes less would help."
    else:
        helps = f"A smaller batch or shorter sequence would help{', or ' + lighter[:-2] if optimizer else ''}"
        helps += f" ({in_units(resident)} are resident before the step begins)."
    if Role.GRADIENT in before:
        helps += (
            " Gradients are resident when the forward begins (accumulation); pass "
            "protocol=StepProtocol(gradients_resident=True) to plan for that from the start."
        )
    return helps
