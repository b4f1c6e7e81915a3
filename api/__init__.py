"""Memory-capped activation checkpointing for PyTorch training steps.

`optimize_checkpoints(model, budget_gb)` returns a model that trains as before, with the peak memory of
the whole step under the budget. Names are imported when they are first used, so that `remat.ir`,
`remat.solvers` and the passes that need no torch can be used without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from remat.ir import (
    GuardError,
    InfeasibleBudgetError,
    PatternError,
    RematError,
    SolverError,
    UnsupportedGraphError,
    VerifyError,
)

if TYPE_CHECKING:
    from remat.passes import Plan, StepProtocol

    from .analysis import analyze, analyze_step
    from .beside import resident_bytes
    from .measure import measure_peak
    from .optimize import optimize_checkpoints, plan_checkpoints
    from .report import MemoryReport
    from .views.step_report import StepReport

_HOME = {
    "MemoryReport": "remat.report",
    "analyze": "remat.analysis",
    "analyze_step": "remat.analysis",
    "Plan": "remat.passes",
    "StepProtocol": "remat.passes",
    "StepReport": "remat.views.step_report",
    "measure_peak": "remat.measure",
    "optimize_checkpoints": "remat.optimize",
    "plan_checkpoints": "remat.optimize",
    "resident_bytes": "remat.beside",
}

__all__ = [
    "GuardError",
    "InfeasibleBudgetError",
    "MemoryReport",
    "PatternError",
    "Plan",
    "RematError",
    "SolverError",
    "StepProtocol",
    "StepReport",
    "UnsupportedGraphError",
    "VerifyError",
    "analyze",
    "analyze_step",
    "measure_peak",
    "optimize_checkpoints",
    "plan_checkpoints",
    "resident_bytes",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
