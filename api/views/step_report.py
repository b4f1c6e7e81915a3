"""What is alive when in a training step, and what a plan changes: one record that all pictures read.

A `StepReport` holds one step op by op and tensor by tensor, as numbers: of the planned program, with the
eager one beside it, or of the eager program alone. It is plain data (no torch, no sympy), goes to JSON
and comes back equal. docs/reports.md describes the schema `SCHEMA`.

Definitions are those of `ir.trace`: an instant is the execution of one op; a tensor is held
during ``birth <= i <= death``, -1 and ``len(ops)`` stand for before and after the step; bytes at an instant
are those of the tensors held then, and the op's scratch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "remat.step_report/1"
"""Name and version of the JSON."""
SCRATCH = "scratch"
"""Stands beside the roles in curves: what kernels hold only while they run."""
SAVED, RECOMPUTED, NOT_NEEDED = "saved", "recomputed", "not needed"
"""What becomes of an activation: kept from forward to backward; freed in between and made again; not read by
backward."""


@dataclass(frozen=True, slots=True)
class ExecutedOp:
    """Execution of one op."""

    name: str
    target: str
    """The op, such as ``aten.addmm.default``."""
    phase: str
    """"forward", "backward" or "optimizer step"."""
    repeated: bool
    """It computes again what has been computed and freed."""
    time_ns: int
    """Predicted; 0 if unknown."""
    scratch: int
    """Bytes that its kernel holds only while it runs."""
    module: str
    source: str
    """The user's line, ``file.py:12``."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One result in one storage, until it dies or another result is written over it."""

    name: str
    role: str
    """A `remat.ir.Role`."""
    bytes: int
    birth: int
    death: int
    text: str
    """Type and shape, such as ``f32[8, 128]``; empty if unknown."""
    op: str
    """The op that makes it; empty for what is there before the step."""
    module: str
    source: str
    decision: str = ""
    """For activations of the forward: `SAVED`, `RECOMPUTED` or `NOT_NEEDED`."""
    reason: str = ""
    """Why."""
    recompute_ns: int = 0
    """Predicted time of the op that makes it; 0 if unknown."""
    over: int = -1
    """Number of the tensor, dead from here on, in whose memory it is written; -1: memory of its own."""


@dataclass(frozen=True)
class Timeline:
    """One program for the step."""

    program: str
    """"planned" or "eager"."""
    ops: tuple[ExecutedOp, ...]
    tensors: tuple[HeldTensor, ...]

    @cached_property
    def by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes at each instant by role, `SCRATCH` last; roles in the order in which they appear."""
        n = len(self.ops)
        change: dict[str, list[int]] = {}
        for tensor in self.tensors:
            steps = change.setdefault(tensor.role, [0] * (n + 1))
            steps[max(tensor.birth, 0)] += tensor.bytes
            steps[min(tensor.death, n - 1) + 1] -= tensor.bytes
        curves = {role: tuple(accumulate(steps[:n])) for role, steps in change.items()}
        return curves | {SCRATCH: tuple(op.scratch for op in self.ops)}

    @cached_property
    def curve(self) -> tuple[int, ...]:
        """Bytes on the device at each instant."""
        return tuple(map(sum, zip(*self.by_role.values(), strict=True)))

    @property
    def peak(self) -> int:
        """Largest bytes on the device."""
        return max(self.curve, default=self.resident)

    @property
    def peak_instant(self) -> int:
        """First instant at which the peak is reached; -1 for a step without ops."""
        return self.curve.index(self.peak) if self.ops else -1

    @property
    def resident(self) -> int:
        """Bytes on the device before the step."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.birth < 0)

    def alive(self, instant: int) -> tuple[HeldTensor, ...]:
        """Tensors that are held at an instant, the largest first."""
        held = [t for t in self.tensors if t.birth <= instant <= t.death and t.bytes]
        return tuple(sorted(held, key=lambda tensor: -tensor.bytes))


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """How good a plan is."""

    overhead: float
    """Predicted time of what is recomputed, as a fraction of `step_time_ns`."""
    lower_bound: float
    """No plan of the class has a smaller overhead."""
    gap: float
    """The difference."""
    status: str
    """"optimal" or "feasible"."""
    bound_class: str
    """The plans that the bound is about."""
    step_time_ns: int
    """Predicted time of forward and backward without recomputation."""
    least_peak_bytes: int
    """Smallest peak for which a plan was found."""
    least_peak_bound_bytes: int
    """No plan has a smaller peak."""
    ledger: Mapping[str, int]
    """Peak in bytes with one more means each: captured, ordered, in place, planned; empty for eager."""
    seconds: Mapping[str, float]
    """Time that each part of planning took."""


@dataclass(frozen=True, slots=True)
class FormulaText:
    """One formula, to be read."""

    name: str
    text: str
    latex: str


@dataclass(frozen=True, slots=True)
class Point:
    """One plan on the curve of overhead against budget."""

    budget_bytes: int
    peak_bytes: int
    overhead: float
    lower_bound: float


@dataclass(frozen=True)
class StepReport:
    """One training step: what it holds when, and why."""

    model: str
    device: str
    sizes: Mapping[str, int]
    """The named sizes; empty if none is named."""
    optimizer: str
    loss: str
    versions: Mapping[str, str]
    """Package -> version."""
    budget_bytes: int | None
    timeline: Timeline
    """What is described."""
    baseline: Timeline | None
    """The eager step, if a plan is described."""
    plan: PlanFigures | None
    formulas: tuple[FormulaText, ...]
    frontier: tuple[Point, ...]
    notes: tuple[str, ...]
    """What the figures rest on, a sentence each."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report in the format that the name ends in; see `save.save` and docs/reports.md."""
        from .save import save

        save(self, Path(path))

    def plot(self, axes: "Axes | None" = None) -> "Figure":
        """A matplotlib figure of memory over the step; see `figure.plot`."""
        from .figure import plot

        return plot(self, axes)

    def __str__(self) -> str:
        """The report on one screen."""
        from .text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        """The page, in a frame of a notebook."""
        from .html import to_html

        page = escape(to_html(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:0"></iframe>'

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> "StepReport":
        """The report that `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            schema = data.pop("schema")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError("this is no step report: it is not JSON with a schema") from error
        if schema != SCHEMA:
            raise ValueError(f"this has the schema {schema!r}, and {SCHEMA!r} is what can be read")
        data["timeline"] = _timeline(data["timeline"])
        data["baseline"] = _timeline(data["baseline"]) if data["baseline"] else None
        data["plan"] = PlanFigures(**data["plan"]) if data["plan"] else None
        data["formulas"] = tuple(FormulaText(**each) for each in data["formulas"])
        data["frontier"] = tuple(Point(**each) for each in data["frontier"])
        data["notes"] = tuple(data["notes"])
        return StepReport(**data)


def _timeline(data: Mapping[str, Any]) -> Timeline:
    return Timeline(
        data["program"],
        tuple(ExecutedOp(**op) for op in data["ops"]),
        tuple(HeldTensor(**tensor) for tensor in data["tensors"]),
    )
