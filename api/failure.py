"""What happens where a model cannot be captured or planned: the original trains on, and it is said once."""

from remat.ir import GuardError, InfeasibleBudgetError, PatternError, RematError
from remat.ir.capture import explained


class GivenUpError(Exception):
    """Whoever watches a drop-in has dealt with a plan that failed, and runs the original forward."""


ALWAYS_RAISED = (InfeasibleBudgetError, PatternError, GuardError, GivenUpError)
"""What is not for lack of a plan: the user's budget or patterns ask for the impossible, or forbid one."""


def reason_of(error: Exception) -> str:
    """Why there is no plan, with the user's line if it is known."""
    return str(error if isinstance(error, RematError) else explained(error))


def short(reason: str) -> str:
    """The reason on one line, without the advice."""
    lines = [line.strip() for line in reason.splitlines()]
    return " ".join(lines[:-1] or lines)


def unplanned(reason: str) -> str:
    """The warning."""
    return (
        "remat: no plan could be made, so the original model trains, without the memory cap. "
        f'model.remat.stats.failed says so, too; on_failure="raise" makes it an error. {reason}'
    )
