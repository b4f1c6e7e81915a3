"""The report of `analyze`: what a training step holds when, as formulas and at sizes.

All figures are bytes. Three kinds are kept apart:
    allocated  what tensors, workspaces and kernels' scratch take of torch's allocator, in whole blocks
    reserved   what the allocator takes of the device for them, by a simulation of the allocator
    nvidia-smi reserved, and what the process takes beside the allocator, as a range
The step is the *eager* one, as it runs today. A planned step is described by its plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import sympy

from remat.ir import Trace
from remat.ir.domain import Fixed, Sizes, bound
from remat.passes import profile
from remat.passes.allocator import AllocatorUse, simulate
from remat.passes.allocator_config import AllocatorConfig
from remat.passes.composition import PhasePeak, phase_peaks, retained
from remat.passes.device_memory import DeviceOverheads, nvidia_smi
from remat.passes.formula import Formula, largest_of
from remat.passes.loop import Loop
from remat.passes.rounding import rounded

from . import report_text
from .budget import budget_bytes
from .diagnosis import diagnose
from .example import StepRequest
from .frontier import frontier, largest_planned
from .largest import largest_fit
from .regions import Regions, Step
from .step_reports import report_of_analysis
from .views.step_report import Point, StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step at one binding of the sizes, bytes."""

    peak: int
    resident: int
    """On the device before the step."""
    phases: tuple[PhasePeak, ...]
    curve: tuple[int, ...]
    """On the device at each instant."""
    retained: int
    """Activations at the border from forward to backward."""

    @property
    def peak_phase(self) -> PhasePeak:
        """The phase in which the peak lies."""
        return max(self.phases, key=lambda phase: phase.bytes)


@dataclass(frozen=True, slots=True)
class StepFormulas:
    """One step as expressions in the sizes, bytes."""

    peak: sympy.Expr
    resident: sympy.Expr
    phases: Mapping[str, Formula]
    """Phase -> its peak."""
    ledger: Mapping[str, sympy.Expr]
    """Role -> bytes at the instant of the peak at the example; they add up to that instant's bytes."""
    retained: sympy.Expr
    """Activations at the border from forward to backward."""
    retained_by_module: Mapping[str, sympy.Expr]
    """The same by the module that made them."""


@dataclass(frozen=True, slots=True)
class ScratchNotes:
    """Where figures of scratch come from: number of ops, by op."""

    measured: Mapping[str, int]
    """Kernels that were run here, at the sizes of the example and around them."""
    reserved: Mapping[str, int]
    """Upper estimates: no formula fits all that was measured, or what the kernel takes depends on data."""
    unknown: Mapping[str, int]
    """Taken as 0."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one training step."""

    model: str
    device: str
    precision: str
    optimizer: str
    loop: Loop
    sizes: Mapping[str, int]
    """The example: value of every name."""
    domain: tuple[str, ...]
    """Conditions under which the formulas hold. Methods that take sizes look for other formulas beyond."""
    fixed: tuple[Fixed, ...]
    """Names that the step needs as numbers."""
    peak: sympy.Expr
    """Largest allocated bytes of any step, resident ones included."""
    first: StepFormulas
    """The first step, in which the optimizer makes its state."""
    steady: StepFormulas
    """Every later step."""
    scratch: ScratchNotes
    overheads: DeviceOverheads | None
    """Of a GPU; None for a CPU."""
    device_memory: int
    """Of the device, bytes."""
    _regions: Regions = field(repr=False, compare=False)
    _request: StepRequest | None = field(repr=False, compare=False)

    @property
    def resident(self) -> sympy.Expr:
        """Bytes on the device before a step."""
        return self.steady.resident

    def peak_at(self, *, step: str = "any", **sizes: int) -> int:
        """Peak at sizes, bytes; exact also where the formula is only an estimate of kernels' scratch.

        Args:
            step: "first", "steady", or "any" for the larger of the two.
            sizes: value of names; those left out are as in the example.
        """
        return max(profile(trace).peak for trace in self._traces(step, sizes))

    def resident_at(self, **sizes: int) -> int:
        """Bytes on the device before a step."""
        return profile(self._traces("steady", sizes)[0]).resident

    def at(self, *, step: str = "steady", **sizes: int) -> StepFigures:
        """Figures of one step; see `peak_at` for its arguments."""
        trace = max(self._traces(step, sizes), key=lambda each: profile(each).peak)
        found = profile(trace)
        return StepFigures(
            peak=found.peak,
            resident=found.resident,
            phases=phase_peaks(trace, {}),
            curve=found.bytes,
            retained=sum(int(block.size) for block in retained(trace)),
        )

    def reserved_at(self, *, settings: str = "", step: str = "any", **sizes: int) -> AllocatorUse:
        """What the CUDA caching allocator reserves, by simulation, and whether it fits the device.

        Args:
            settings: as in the variable `PYTORCH_CUDA_ALLOC_CONF`.
            step: see `peak_at`.
            sizes: see `peak_at`.
        """
        if self.overheads is None:
            raise ValueError(
                f"{self.device} has no caching allocator; give analyze a GPU as device"
            )
        memory = self.device_memory - self.overheads.context[1]
        config = AllocatorConfig.from_env(settings, memory)
        used = [simulate(trace, config) for trace in self._asked(step, sizes)]
        return max(used, key=lambda use: (use.out_of_memory is not None, use.peak_reserved))

    def nvidia_smi_at(self, *, world_size: int = 1, **sizes: int) -> tuple[int, int]:
        """Least and most that `nvidia-smi` would show for the process, bytes."""
        if self.overheads is None:
            raise ValueError(f"{self.device} is no GPU; pass device='cuda:A100-80GB' to analyze")
        reserved = self.reserved_at(**self.binding(sizes)).peak_reserved
        return nvidia_smi(reserved, self.overheads, world_size)

    def largest(
        self, name: str, budget_gb: float | str, *, checkpointing: bool = False, **sizes: int
    ) -> int:
        """The largest value of a size whose step fits; 0 if none does.

        Args:
            name: of the size that is looked for, such as "batch".
            budget_gb: see `optimize_checkpoints`; parts of a device refer to that of the report.
            checkpointing: activations may be recomputed. The answer is a size for which a plan was found;
                that no larger one fits is as far as was found.
            sizes: the other sizes; those left out are as in the example.

        Raises:
            ValueError: no such name, the peak does not depend on it, or the budget cannot be read.
        """
        budget = budget_bytes(budget_gb, self.device_memory)
        chosen = self.binding(sizes)
        self.binding({name: 1})
        for fixed in (each for each in self.fixed if each.name == name):
            raise ValueError(
                f"the step needs {name} = {fixed.value} as a number ({fixed.where or 'unknown where'}), so "
                "no other can be looked for. Take sizes from tensors: x.shape[0], not len(x)."
            )
        found = largest_fit(
            name,
            budget,
            chosen,
            lambda at: largest_of([step.formula for step in self._steps("any", at)]),
            lambda at: self.peak_at(**self.binding(at)),
        )
        if not checkpointing:
            return found
        return largest_planned(self._planning(), self.device, name, budget, chosen, found)

    def frontier(self, count: int = 6, **sizes: int) -> tuple[Point, ...]:
        """Overhead against budget: plans at `count` budgets from the least peak to eager's.

        Args:
            count: of budgets, at least 2.
            sizes: see `peak_at`.
        """
        if count < 2:
            raise ValueError(f"count must be at least 2, not {count}")
        chosen = self.binding(sizes)
        return frontier(self._planning(), self.device, self.peak_at(**chosen), chosen, count)

    def _planning(self) -> StepRequest:
        if self._request is None:
            raise ValueError("plans need a model: this report is of a function (analyze_step)")
        return self._request

    def formulas(self, *, latex: bool = False) -> str:
        """The formulas of every phase and of the composition at the peak, a line each."""
        return report_text.formulas(self, latex=latex)

    def diagnosis(self, budget_gb: float | str, **sizes: int) -> str:
        """Whether the step fits, why not, and what would help, in words."""
        return diagnose(self, budget_bytes(budget_gb, self.device_memory), self.binding(sizes))

    def to_json(self, **sizes: int) -> str:
        """The report at sizes as JSON; docs/memory.md describes the schema."""
        return report_text.to_json(self, self.binding(sizes))

    def step_report(self, *, step: str = "steady", **sizes: int) -> StepReport:
        """One step op by op and tensor by tensor: what pictures and files are made of; see `peak_at`."""
        trace = max(self._traces(step, sizes), key=lambda each: profile(each).peak)
        return report_of_analysis(self, trace, self.binding(sizes), step)

    def save(self, path: str | PathLike[str], *, step: str = "steady", **sizes: int) -> None:
        """Write one step as a page, a figure, a file for a viewer; see `StepReport.save`."""
        self.step_report(step=step, **sizes).save(path)

    def plot(self, axes: "Axes | None" = None, *, step: str = "steady", **sizes: int) -> "Figure":
        """A matplotlib figure of one step's memory."""
        return self.step_report(step=step, **sizes).plot(axes)

    def _repr_html_(self) -> str:
        """The page of the steady step, in a notebook."""
        return self.step_report()._repr_html_()

    def notes(self) -> list[str]:
        """Conditions of the formulas, and what they do not know, a line each."""
        return report_text.notes(self)

    def __str__(self) -> str:
        """The report at its example's sizes."""
        return report_text.summary(self)

    def binding(self, sizes: Sizes) -> dict[str, Any]:
        """Every name with its value: as given, else as in the example.

        Raises:
            ValueError: no such name, or a value below 1.
        """
        for name, value in sizes.items():
            if name not in self.sizes:
                known = ", ".join(self.sizes) or "none"
                raise ValueError(f"no size {name!r}; the sizes are: {known}")
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        return {**self.sizes, **sizes}

    def _steps(self, step: str, sizes: Sizes) -> list[Step]:
        region = self._regions.at(self.binding(sizes))
        steps = {"first": [region.first], "steady": [region.steady]}
        if step not in (*steps, "any"):
            raise ValueError(f"step must be 'first', 'steady' or 'any', not {step!r}")
        return steps.get(step, [region.first, region.steady])

    def _asked(self, step: str, sizes: Sizes) -> list[Trace]:
        """Traces in numbers, as bytes are asked for."""
        binding = bound(self.binding(sizes))
        measures = self._regions.target.measures
        return [each.at(binding, measures) for each in self._steps(step, sizes)]

    def _traces(self, step: str, sizes: Sizes) -> list[Trace]:
        """The same in blocks as large as the device's."""
        traces = self._asked(step, sizes)
        return [rounded(trace) for trace in traces] if self._regions.target.cuda else traces
