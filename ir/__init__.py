"""The graph: ops, storages, sizes, phases; capture from torch; the event trace of a step."""

from .errors import (
    GuardError,
    InfeasibleBudgetError,
    PatternError,
    RematError,
    SolverError,
    UnsupportedGraphError,
    VerifyError,
)
from .graph import (
    BORDER,
    LOSS,
    ROOT_GRADIENT,
    Graph,
    Op,
    Output,
    OutputKind,
    Storage,
    Value,
)
from .text import to_text
from .trace import Block, Instant, Phase, Role, Trace, positive
from .verify import verify

__all__ = [
    "BORDER",
    "LOSS",
    "ROOT_GRADIENT",
    "Block",
    "Graph",
    "GuardError",
    "InfeasibleBudgetError",
    "Instant",
    "Op",
    "Output",
    "OutputKind",
    "PatternError",
    "Phase",
    "RematError",
    "Role",
    "SolverError",
    "Storage",
    "Trace",
    "UnsupportedGraphError",
    "Value",
    "VerifyError",
    "positive",
    "to_text",
    "verify",
]
