"""A step report on one screen: before and after by role, the peak, the decisions that matter most."""

from remat.budget import in_units

from .groups import Alike, alike, decisions
from .step_report import PlanFigures, StepReport, Timeline
from .units import in_seconds, shortened

DECISIONS = 10
"""Rows of decisions that are shown."""
HOLDERS = 5
"""Rows of what is held at the peak."""


def to_text(report: StepReport, width: int = 100) -> str:
    """The report in lines of at most `width` characters."""
    lines = [*_head(report), "", *_ledger(report), "", *_peak(report, width)]
    if report.plan is not None:
        lines += ["", *_quality(report, report.plan)]
    if report.timeline.program == "planned":
        lines += ["", *_decisions(report.timeline, width)]
    return "\n".join(shortened(line, width).rstrip() for line in lines)


def at_peak(timeline: Timeline) -> dict[str, int]:
    """Bytes by role at the peak; roles that hold none are left out."""
    if not timeline.ops:
        return {}
    curves = timeline.by_role.items()
    return {role: at for role, curve in curves if (at := curve[timeline.peak_instant])}


def where(timeline: Timeline) -> str:
    """What executes at the peak."""
    if not timeline.ops:
        return "before the step"
    op = timeline.ops[timeline.peak_instant]
    place = ", ".join(part for part in (op.module, op.source) if part)
    again = "recomputation in " if op.repeated else ""
    return f"{op.target} in {again}{op.phase}" + (f" ({place})" if place else "")


def _head(report: StepReport) -> list[str]:
    sizes = ", ".join(f"{name}={size}" for name, size in report.sizes.items())
    head = f"{report.model} on {report.device}" + (f", {sizes}" if sizes else "")
    return [
        f"{head}; optimizer {report.optimizer}" + (f"; loss {report.loss}" * bool(report.loss))
    ]


def _ledger(report: StepReport) -> list[str]:
    """Bytes at the peak by role, of eager and of the plan side by side."""
    after = report.timeline
    before = report.baseline or after
    both = report.baseline is not None
    left, right = at_peak(before), at_peak(after)
    roles = sorted({**left, **right}, key=lambda role: -max(left.get(role, 0), right.get(role, 0)))
    rows = [("peak", before.peak, after.peak)]
    rows += [(f"  {role}", left.get(role, 0), right.get(role, 0)) for role in roles]
    rows.append(("before the step", before.resident, after.resident))
    head = f"{'':<20}{'eager':>12}" + (f"{'planned':>12}{'change':>12}" if both else "")
    lines = [head]
    for name, was, now in rows:
        line = f"{name:<20}{in_units(was):>12}"
        if both:
            change = ("+" if now > was else "") + in_units(now - was) if now != was else "="
            line += f"{in_units(now):>12}{change:>12}"
        lines.append(line)
    if report.budget_bytes is not None:
        lines.append(f"{'budget':<20}{'':>{12 * both}}{in_units(report.budget_bytes):>12}")
    return lines


def _peak(report: StepReport, width: int) -> list[str]:
    timeline = report.timeline
    lines = [f"eager's peak at {where(report.baseline)}"] if report.baseline else []
    lines.append(f"peak at {where(timeline)}")
    lines.append("where these hold the most:")
    held = alike(timeline.alive(timeline.peak_instant))
    lines += _table(held[:HOLDERS], width, held=True)
    rest = held[HOLDERS:]
    if rest:
        lines.append(f"  {in_units(sum(row.bytes for row in rest)):>10}  {len(rest)} more kinds")
    return lines


def _quality(report: StepReport, plan: PlanFigures) -> list[str]:
    if report.timeline.program == "eager":
        return ["the budget is at or above eager's peak: the step runs as it is"]
    lines = [
        f"recomputation +{plan.overhead:.2%} of the step's predicted time; no plan of its class needs less "
        f"than +{plan.lower_bound:.2%}",
        f"(gap {100 * plan.gap:.2f} points; {plan.status}; {plan.bound_class})",
        f"least peak found {in_units(plan.least_peak_bytes)}, "
        f"none below {in_units(plan.least_peak_bound_bytes)}",
    ]
    if plan.ledger:
        steps = (f"{in_units(peak)} {name}" for name, peak in plan.ledger.items())
        lines.append("peak " + ", ".join(steps))
    return lines


def _decisions(timeline: Timeline, width: int) -> list[str]:
    rows = decisions(timeline)
    lines = [f"the decisions that matter most, of {len(rows)} (layers alike in one row):"]
    lines += _table(rows[:DECISIONS], width, held=False)
    return lines


def _table(rows: tuple[Alike, ...], width: int, *, held: bool) -> list[str]:
    """Rows of tensors; the place gets what is left of the width."""
    lines = []
    for row in rows:
        count = f"{row.count} x" if row.count > 1 else ""
        what = row.role if held else row.decision
        time = "" if held else f"{in_seconds(row.recompute_ns):>10}"
        head = f"  {in_units(row.bytes):>10}{time}  {what:<15} {count:>6} {row.text:<22} "
        op = row.op.removeprefix("aten.").partition(".")[0]
        lines.append(head + shortened(f"{row.place} {op}".strip(), max(12, width - len(head))))
    return lines
