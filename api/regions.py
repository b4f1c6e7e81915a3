"""Regions of sizes: one symbolic trace holds inside its guards only, another size gets another trace.

A *region* is the set of sizes that fulfil the conditions of one trace. Regions are found as they are
asked for: a size that no known region has is traced anew, from the example brought to that size. A size of
1 is never a symbol (tensors with a dimension of 1 are laid out in other ways), so it has a region of its
own. An example of size 1 is traced at 2, unless the step does not run there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from remat.ir import RematError, Trace
from remat.ir.domain import Domain, Fixed, Sizes
from remat.passes import Call, measure_scratch
from remat.passes.device_memory import DeviceOverheads
from remat.passes.eager import EagerStep, with_scratch
from remat.passes.formula import Formula, formula
from remat.passes.memory import with_numbers
from remat.passes.rounding import rounded
from remat.passes.scratch import Origin
from remat.passes.scratch_fit import FittedScratch, fit_scratch
from remat.passes.workspace import with_workspaces

_EXACT = 2**30
"""Bytes of arguments and results up to which a kernel is run to learn its scratch at one size."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the step runs."""

    name: str
    cuda: bool
    """CUDA's kernels and block sizes."""
    measures: bool
    """Kernels can be run here to learn their scratch."""
    overheads: DeviceOverheads | None = None
    """What is there beside tensors; None for a CPU."""
    scratch: Callable[[Sequence[Call]], Sequence[FittedScratch]] | None = None
    """Scratch by formula, for a device that is not at hand."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of step in one region."""

    asked: Trace
    """With scratch as expressions and workspaces; sizes as they are asked for."""
    trace: Trace
    """The same in blocks as large as the device's."""
    scratch: tuple[FittedScratch, ...]
    """Per instant."""
    calls: tuple[Call, ...]
    """Per instant."""
    formula: Formula
    """Of its peak."""

    def at(self, binding: Mapping[sympy.Symbol, int], measures: bool) -> Trace:
        """`asked` in numbers, with the scratch that kernels take at these sizes, where they can be run."""
        if not measures:
            return with_numbers(self.asked, binding)
        measured = measure_scratch(self.calls, binding, _EXACT)
        known = (
            FittedScratch(instant.scratch, found.origin)
            if found.origin is Origin.UNKNOWN
            else found
            for instant, found in zip(self.asked.instants, measured, strict=True)
        )
        return with_numbers(with_scratch(self.asked, tuple(known)), binding)


@dataclass(frozen=True, slots=True)
class Region:
    """Sizes for which one trace holds."""

    domain: Domain
    fixed: tuple[Fixed, ...]
    first: Step
    steady: Step


class Regions:
    """All regions of a step that have been asked for."""

    def __init__(self, follow: Callable[[Sizes], EagerStep], sizes: Sizes, target: Target) -> None:
        """Start without any.

        Args:
            follow: the step at sizes; those above 1 are symbols.
            sizes: value of every name in the example.
            target: where the step runs.
        """
        self.sizes = sizes
        self.target = target
        self._follow = follow
        self._known: list[Region] = []

    def main(self) -> Region:
        """The region of the example, where every size of 1 is taken to be 2 if the step runs there."""
        larger = {name: max(size, 2) for name, size in self.sizes.items()}
        if larger == self.sizes:
            return self.at(larger)
        try:
            return self.at(larger)
        except (RuntimeError, ValueError, RematError):
            return self.at(self.sizes)

    def at(self, sizes: Sizes) -> Region:
        """The region that has `sizes`, traced if it is new."""
        for region in self._known:
            if not region.domain.why_not(sizes):
                return region
        step = self._follow(sizes)
        region = Region(
            domain=step.domain,
            fixed=step.fixed,
            first=_finished(step, step.first_trace, step.first_calls, self.target, first=True),
            steady=_finished(step, step.trace, step.calls, self.target, first=False),
        )
        self._known.append(region)
        return region


def _finished(
    step: EagerStep, trace: Trace, calls: tuple[Call, ...], target: Target, *, first: bool
) -> Step:
    if target.measures:
        scratch = fit_scratch(calls, step.domain.symbols, step.domain.conditions)
    elif target.scratch is not None:
        scratch = tuple(target.scratch(calls))
    else:
        scratch = (FittedScratch(sympy.S.Zero, Origin.UNKNOWN),) * len(calls)
    trace = with_scratch(trace, scratch)
    if target.overheads:
        trace = with_workspaces(trace, target.overheads, first=first)
    whole = rounded(trace) if target.cuda else trace
    return Step(trace, whole, scratch, calls, formula(whole))
