"""The message for a budget that no plan meets: what the least peak is, where, and what fills it."""

from remat.ir import InfeasibleBudgetError, Phase, Role, Trace
from remat.passes import alive_at, profile

from .budget import in_units

_STATES = (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE)


def infeasible_error(budget: int, least: int, trace: Trace) -> InfeasibleBudgetError:
    """Explain why `budget` cannot be met.

    Args:
        budget: bytes asked for.
        least: the least peak for which a plan was found, bytes.
        trace: the step of that plan.
    """
    found = profile(trace)
    at = found.peak_instant
    instant = trace.instants[at]
    held: dict[Role, int] = {}
    for block in alive_at(trace, at):
        held[block.role] = held.get(block.role, 0) + int(block.size)
    parts = sorted(((size, role) for role, size in held.items() if size), reverse=True)
    filling = ", ".join(f"{role} {in_units(size)}" for size, role in parts)
    scratch = f", scratch {in_units(int(instant.scratch))}" if instant.scratch else ""
    where = f"{instant.target} in {instant.phase}"
    where += f", {instant.module}" if instant.module else ""
    where += f" ({instant.source})" if instant.source else ""
    states = found.resident
    if states > budget or instant.phase is Phase.OPTIMIZER:
        helps = (
            "Model states alone fill the budget; checkpointing cannot help there. An optimizer with less "
            "state, parameters in lower precision, or sharding would."
        )
    else:
        helps = (
            "A smaller batch or shorter sequence would help, or an optimizer with less state "
            f"({in_units(states)} are resident before the step begins)."
        )
    return InfeasibleBudgetError(
        f"no plan fits a budget of {budget} bytes ({in_units(budget)}).\n"
        f"  least feasible peak: {least} bytes ({in_units(least)})\n"
        f"  reached at: {where}\n"
        f"  filled by: {filling}{scratch}\n"
        f"{helps} A budget of '{least}B' is feasible.",
        budget_bytes=budget,
        least_peak_bytes=least,
    )
