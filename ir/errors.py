"""All exception types. Each message says what happened, where, and what to do about it."""


class RematError(Exception):
    """Base of every error that this library raises on purpose."""


class UnsupportedGraphError(RematError):
    """The model holds an op or construct that cannot be planned; names it, its source line, the way out."""


class InfeasibleBudgetError(RematError):
    """No plan fits the budget; names the least feasible peak, where it is and what fills it.

    Attributes:
        budget_bytes: the budget that was asked for, bytes.
        least_peak_bytes: the smallest budget for which a plan was found, bytes.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_peak_bytes: int) -> None:
        """Keep the two figures beside the message, so that a caller can retry with the second."""
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes


class PatternError(RematError):
    """A `save` or `recompute` pattern matches nothing, or cannot be kept; names it, and what is near."""


class SolverError(RematError):
    """A solver stopped without an answer that could be used; names the status and the limits."""


class VerifyError(RematError):
    """A graph, problem or plan breaks an invariant that `verify` lists; prints its surroundings."""


class GuardError(RematError):
    """A plan was used outside the conditions under which it is valid."""
