"""The report of `analyze` in words and as JSON."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remat.passes.composition import PhasePeak
from remat.passes.formula_text import to_latex, to_text

from .budget import in_units

if TYPE_CHECKING:
    from .report import MemoryReport, StepFigures, StepFormulas

SCHEMA = "remat.memory_report/1"
"""Name and version of the JSON; see docs/memory.md."""
_HOLDERS = 6


def summary(report: "MemoryReport") -> str:
    """The report at its example's sizes, for people."""
    steady = report.at()
    first = report.at(step="first")
    sizes = ", ".join(f"{name}={value}" for name, value in report.sizes.items()) or "fixed sizes"
    lines = [
        f"{report.model} on {report.device}, {report.precision}, optimizer {report.optimizer}; {sizes}",
        f"  peak {in_units(max(steady.peak, first.peak))} (first step {in_units(first.peak)}), "
        f"in {steady.peak_phase.phase} at {where(steady.peak_phase)}",
        f"  before the step {in_units(steady.resident)}; activations kept for backward "
        f"{in_units(steady.retained)}",
        "",
        "  phase            peak        holding",
    ]
    for phase in steady.phases:
        roles = ", ".join(f"{role} {in_units(size)}" for role, size in phase.by_role.items())
        lines.append(f"  {phase.phase.value:<15}  {in_units(phase.bytes):<10}  {roles}")
    lines += ["", f"  at the peak, {where(steady.peak_phase)}, the bytes are held by"]
    lines += [f"    {line}" for line in holder_lines(steady.peak_phase)]
    lines += ["", *(f"  {line}" for line in notes(report))]
    return "\n".join(lines)


def holder_lines(phase: PhasePeak) -> list[str]:
    """The largest holders of a phase's peak, and the rest in one line."""
    lines = []
    for holder in phase.holders[:_HOLDERS]:
        made = " ".join(part for part in (holder.module, holder.op, holder.source) if part)
        count = f"{holder.blocks} x " if holder.blocks > 1 else ""
        lines.append(f"{in_units(holder.bytes):<10} {holder.role.value}: {count}{made}")
    rest = phase.holders[_HOLDERS:]
    if rest:
        lines.append(f"{in_units(sum(h.bytes for h in rest)):<10} {len(rest)} others")
    return lines


def where(phase: PhasePeak) -> str:
    """The instant of a peak."""
    place = " ".join(part for part in (phase.module, phase.source) if part)
    return f"{phase.op} ({place})" if place else phase.op


def notes(report: "MemoryReport") -> list[str]:
    """Conditions of the formulas, and what they do not know, a line each."""
    lines = []
    if report.domain:
        lines.append("formulas hold for " + ", ".join(report.domain))
    for each in report.fixed:
        lines.append(f"{each.name} is {each.value}: the step needs it as a number ({each.where})")
    for title, ops in (
        ("scratch estimated from above", report.scratch.reserved),
        ("scratch not known, taken as 0", report.scratch.unknown),
    ):
        if ops:
            lines.append(f"{title}: {len(ops)} ops, {sum(ops.values())} calls")
    return lines


def formulas(report: "MemoryReport", *, latex: bool = False) -> str:
    """Every formula of the report, a line each."""
    write = to_latex if latex else to_text
    lines = [f"peak = {write(report.peak)}", f"resident = {write(report.resident)}"]
    for name, step in (("first step", report.first), ("every later step", report.steady)):
        lines += ["", f"{name}:"]
        lines += [f"  {line}" for line in _step_lines(step, write)]
    lines += ["", *notes(report)]
    return "\n".join(lines).rstrip()


def _step_lines(step: "StepFormulas", write: Any) -> list[str]:
    lines = [f"{phase} = {write(found.peak)}" for phase, found in step.phases.items()]
    lines.append(f"retained activations = {write(step.retained)}")
    lines.append("at the peak:")
    lines += [f"  {role} = {write(size)}" for role, size in step.ledger.items() if size != 0]
    return lines


def to_json(report: "MemoryReport", sizes: Mapping[str, Any]) -> str:
    """The report at `sizes` as JSON, in the schema `SCHEMA`; all sizes of memory in bytes."""
    data = {
        "schema": SCHEMA,
        "model": report.model,
        "device": report.device,
        "precision": report.precision,
        "optimizer": report.optimizer,
        "sizes": dict(sizes),
        "domain": list(report.domain),
        "fixed": {each.name: each.value for each in report.fixed},
        "formulas": {
            "peak": str(report.peak),
            "resident": str(report.resident),
            "first": _formulas(report.first),
            "steady": _formulas(report.steady),
        },
        "first": _figures(report.at(step="first", **sizes)),
        "steady": _figures(report.at(**sizes)),
        "scratch": {
            "measured": dict(report.scratch.measured),
            "reserved": dict(report.scratch.reserved),
            "unknown": dict(report.scratch.unknown),
        },
    }
    return json.dumps(data, indent=1)


def _formulas(step: "StepFormulas") -> dict[str, Any]:
    return {
        "peak": str(step.peak),
        "resident": str(step.resident),
        "retained": str(step.retained),
        "phases": {phase: str(found.peak) for phase, found in step.phases.items()},
        "ledger": {role: str(size) for role, size in step.ledger.items()},
    }


def _figures(step: "StepFigures") -> dict[str, Any]:
    return {
        "peak": step.peak,
        "resident": step.resident,
        "retained": step.retained,
        "curve": list(step.curve),
        "phases": [
            {
                "phase": phase.phase.value,
                "peak": phase.bytes,
                "instant": phase.instant,
                "op": phase.op,
                "module": phase.module,
                "source": phase.source,
                "by_role": {role.value: size for role, size in phase.by_role.items()},
                "holders": [
                    {
                        "role": holder.role.value,
                        "module": holder.module,
                        "op": holder.op,
                        "source": holder.source,
                        "blocks": holder.blocks,
                        "bytes": holder.bytes,
                    }
                    for holder in phase.holders
                ],
            }
            for phase in step.phases
        ],
    }
