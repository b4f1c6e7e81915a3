"""From the traces of a step to the formulas of its report."""

from collections import Counter
from collections.abc import Mapping, Sequence

import sympy

from remat.ir import Phase, Role
from remat.passes import alive_at, profile
from remat.passes.composition import retained
from remat.passes.formula import formula, largest_of
from remat.passes.loop import Loop
from remat.passes.memory import with_numbers
from remat.passes.scratch import Origin

from .example import StepRequest
from .regions import Regions, Step
from .report import MemoryReport, ScratchNotes, StepFormulas


def make_report(
    regions: Regions,
    *,
    loop: Loop,
    request: StepRequest | None,
    model: str,
    precision: str,
    optimizer: str,
    device_memory: int,
) -> MemoryReport:
    """The report of a step, with the formulas of the example's region."""
    region = regions.main()
    return MemoryReport(
        model=model,
        device=regions.target.name,
        precision=precision,
        optimizer=optimizer,
        loop=loop,
        sizes=regions.sizes,
        domain=tuple(map(str, region.domain.conditions)),
        fixed=region.fixed,
        peak=largest_of([region.first.formula, region.steady.formula]),
        first=step_formulas(region.first, region.domain.symbols),
        steady=step_formulas(region.steady, region.domain.symbols),
        scratch=_notes(region.steady),
        overheads=regions.target.overheads,
        device_memory=device_memory,
        _regions=regions,
        _request=request,
    )


def step_formulas(step: Step, example: Mapping[sympy.Symbol, int]) -> StepFormulas:
    """Peaks and composition of one step as expressions."""
    trace = step.trace
    top = profile(with_numbers(trace, example)).peak_instant
    ledger: dict[str, list[sympy.Expr]] = {}
    for block in alive_at(trace, top):
        ledger.setdefault(block.role, []).append(block.size)
    ledger.setdefault(Role.TEMPORARY, []).append(trace.instants[top].scratch)
    kept = retained(trace)
    modules: dict[str, list[sympy.Expr]] = {}
    for block in kept:
        modules.setdefault(trace.instants[block.birth].module, []).append(block.size)
    return StepFormulas(
        peak=step.formula.peak,
        resident=step.formula.resident,
        phases={
            phase.value: formula(trace, phase=phase)
            for phase in Phase
            if any(instant.phase is phase for instant in trace.instants)
        },
        ledger={role.value: _sum(ledger[role]) for role in Role if role in ledger},
        retained=_sum([block.size for block in kept]),
        retained_by_module={module: _sum(sizes) for module, sizes in modules.items()},
    )


def _sum(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    counts = Counter(sizes)
    return sympy.expand(sympy.Add(*(count * size for size, count in counts.items())))


def _notes(step: Step) -> ScratchNotes:
    counts: dict[Origin, Counter[str]] = {origin: Counter() for origin in Origin}
    for call, found in zip(step.calls, step.scratch, strict=True):
        counts[found.origin][str(call.target)] += 1
    return ScratchNotes(
        measured=dict(counts[Origin.MEASURED] + counts[Origin.FITTED]),
        reserved=dict(counts[Origin.RESERVED]),
        unknown=dict(counts[Origin.UNKNOWN]),
    )
