"""What to look at when a step does not fit, in words, from the report's own figures.

Causes are tried in the order in which they exclude each other: what is resident alone is too large; the
optimizer step is the peak; one instant's temporaries are; activations are, and a smaller size helps or
not; allocated fits but reserved does not. Every sentence ends in the figure that decides it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remat.ir import Phase, Role

from .budget import in_units
from .report_text import holder_lines, where

if TYPE_CHECKING:
    from .report import MemoryReport, StepFigures

_STATES = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)


def diagnose(report: "MemoryReport", budget: int, sizes: Mapping[str, Any]) -> str:
    """Whether the step fits into `budget` bytes at `sizes`, why not, and what would help."""
    first, steady = report.at(step="first", **sizes), report.at(**sizes)
    step = max((steady, first), key=lambda each: each.peak)
    at = ", ".join(f"{name}={value}" for name, value in sizes.items())
    if step.peak <= budget:
        lines = [f"It fits: the peak is {in_units(step.peak)} of {in_units(budget)} ({at})."]
        return "\n".join(lines + _reserved(report, budget, sizes))
    lines = [
        f"It does not fit: the peak is {in_units(step.peak)}, over {in_units(budget)} ({at})."
    ]
    lines += _cause(report, step, budget, sizes)
    lines.append("Held at the peak, " + where(step.peak_phase) + ":")
    lines += [f"  {line}" for line in holder_lines(step.peak_phase)]
    return "\n".join(lines)


def _cause(
    report: "MemoryReport", step: "StepFigures", budget: int, sizes: Mapping[str, Any]
) -> list[str]:
    peak = step.peak_phase
    states = sum(peak.by_role.get(role, 0) for role in _STATES)
    if states > budget:
        return [
            "Parameters, gradients and optimizer state alone are too large. No batch size and no "
            "recomputation helps: use an optimizer with less state, lower precision, or shard them. "
            f"They take {in_units(states)}."
        ]
    temporaries = peak.by_role.get(Role.TEMPORARY, 0)
    if peak.phase is Phase.OPTIMIZER:
        before = max(p.bytes for p in step.phases if p.phase is not peak.phase)
        return [
            "The optimizer step is the peak, so recomputation and a smaller batch do not help. Its "
            "temporaries do not exist with fused=True, or are smaller with foreach=False. They take "
            f"{in_units(temporaries)}; forward and backward peak at {in_units(before)}."
        ]
    if temporaries > peak.bytes - states - temporaries and temporaries > step.peak - budget:
        return [
            "One instant's temporaries are the peak: split that op (a loss in chunks, attention "
            f"without its matrix). They take {in_units(temporaries)}."
        ]
    lines = [f"Activations are the peak: backward finds {in_units(step.retained)} of them."]
    for name in sizes:
        others: dict[str, Any] = {other: value for other, value in sizes.items() if other != name}
        found = report.largest(name, f"{budget}B", **others)
        if found:
            lines.append(f"The largest {name} that fits as it is: {found}.")
    lines.append(
        "optimize_checkpoints recomputes some of them instead of keeping all; "
        "report.largest(..., checkpointing=True) says what fits then."
    )
    return lines


def _reserved(report: "MemoryReport", budget: int, sizes: Mapping[str, Any]) -> list[str]:
    if report.overheads is None:
        return []
    use = report.reserved_at(**sizes)
    low, high = report.nvidia_smi_at(**sizes)
    text = (
        f"torch's allocator reserves {in_units(use.peak_reserved)} for it, and nvidia-smi would show "
        f"{in_units(low)} to {in_units(high)}."
    )
    if use.out_of_memory is not None or high > budget:
        return [
            text,
            "That may be over: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves "
            f"{in_units(report.reserved_at(settings='expandable_segments:True', **sizes).peak_reserved)}.",
        ]
    return [text]
