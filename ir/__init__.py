"""The graph: ops, storages, sizes, phases; capture from torch; the event trace of a step."""

from .errors import (
    GuardError,
    InfeasibleBudgetError,
    RematError,
    SolverError,
    UnsupportedGraphError,
    VerifyError,
)
from .trace import Block, Instant, Phase, Role, Trace

__all__ = [
    "Block",
    "GuardError",
    "InfeasibleBudgetError",
    "Instant",
    "Phase",
    "RematError",
    "Role",
    "SolverError",
    "Trace",
    "UnsupportedGraphError",
    "VerifyError",
]
