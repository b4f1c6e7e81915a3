"""The text summary of a plan."""

from typing import TYPE_CHECKING

from remat.passes import Patterns, Plan, Tensor, profile

from .budget import in_units
from .planned import Planned

if TYPE_CHECKING:
    from .stats import Stats

SHOWN = 10
"""Decisions that are listed."""


def explain(planned: Planned, stats: "Stats | None" = None) -> str:
    """What a plan does and what it rests on, on one screen."""
    plan = planned.plan
    lines = [*_figures(plan), *_peak(planned), *_decisions(plan), *rests_on(plan)]
    if stats is not None:
        lines.append(f"calls: {stats.planned} planned, {sum(stats.fallbacks.values())} fallbacks")
        lines += [f"  {count} x {reason}" for reason, count in stats.fallbacks.items()]
        lines += [f"  {n} x eager's backward: {reason}" for reason, n in stats.uncapped.items()]
        lines += [f"  another plan: {reason}" for reason in stats.replanned]
    seconds = ", ".join(f"{part} {s:.1f}" for part, s in planned.seconds.items())
    source = ", found in the cache" if planned.from_file else ""
    lines.append(f"planning: {sum(planned.seconds.values()):.1f} s ({seconds}){source}")
    return "\n".join(lines)


def _figures(plan: Plan) -> list[str]:
    rows = [
        ("budget", plan.budget_bytes),
        ("peak", plan.peak_bytes),
        ("eager peak", plan.baseline_peak_bytes),
        ("least peak", plan.least_peak_bytes),
        ("no less than", plan.least_peak_bound_bytes),
        ("resident", plan.resident_bytes),
    ]
    lines = [f"{name:<12} {in_units(size):>12}  {size:>16,} B" for name, size in rows]
    if plan.is_eager:
        return [*lines, "The budget is at or above eager's peak: the step runs as it is."]
    return [
        *lines,
        *_ledger(plan),
        f"recomputation: +{plan.overhead:.2%} of the step's predicted time, proven to be within "
        f"{plan.gap * 100:.2f} points of the least ({plan.status}; {plan.bound_class})",
    ]


def _ledger(plan: Plan) -> list[str]:
    if plan.ledger is None:
        return []
    peaks = plan.ledger
    means = (
        ("order", peaks.captured - peaks.ordered),
        ("in-place reuse", peaks.ordered - peaks.in_place),
        ("recomputation", peaks.in_place - peaks.planned),
    )
    gains = ", ".join(
        f"{name} {'+' if saved < 0 else '-'}{in_units(abs(saved))}" for name, saved in means
    )
    return [f"from {in_units(peaks.captured)} as captured: {gains}"]


def _peak(planned: Planned) -> list[str]:
    found = profile(planned.trace)
    instant = planned.trace.instants[found.peak_instant]
    held = sorted(
        ((curve[found.peak_instant], role) for role, curve in found.by_role.items()), reverse=True
    )
    filled = ", ".join(f"{role} {in_units(size)}" for size, role in held if size)
    where = " ".join(part for part in (instant.module, instant.source) if part)
    at = f"{instant.target} in {instant.phase}" + (f" ({where})" if where else "")
    return [f"peak at {at}: {filled}"]


def _decisions(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan.is_eager:
        return lines
    for title, tensors in (("saved", plan.saved), ("recomputed", plan.recomputed)):
        lines.append(f"{title}: {len(tensors)} tensors, {in_units(sum(t.bytes for t in tensors))}")
        largest = sorted(tensors, key=lambda t: -t.bytes)[:SHOWN]
        name = max((len(t.name) for t in largest), default=0)
        op = max((len(t.op) for t in largest), default=0)
        lines += [f"  {in_units(t.bytes):>10}  {_row(t, name, op)}" for t in largest]
    lines.append(f"written over a dying operand: {len(plan.reused)} results")
    return lines


def _row(tensor: Tensor, name: int, op: int) -> str:
    """One line, with columns as wide as the longest name and op."""
    return f"{tensor.name:<{name}} {tensor.op:<{op}} {tensor.module} {tensor.source}".rstrip()


def rests_on(plan: Plan) -> list[str]:
    """What the figures of a plan rest on, a line each."""
    protocol = plan.protocol
    lines = [
        f"counted: optimizer {plan.optimizer}; loss {plan.loss}; gradients "
        f"{'resident' if protocol.gradients_resident else 'absent'} at forward; outputs "
        f"{'held' if protocol.outputs_held else 'dropped'} by the caller",
        f"target: {plan.device}; times by {plan.cost_model}; graph by {plan.route or 'none'}",
    ]
    if protocol.other_bytes:
        lines.append(
            f"beside: {in_units(protocol.other_bytes)} of other models, DDP's buckets, other_bytes"
        )
    if plan.sizes:
        sizes = ", ".join(f"{name} = {size}" for name, size in plan.sizes.items())
        lines.append(f"sizes: made at {sizes}; can run where {', '.join(plan.domain)}")
    lines += [f"  peak is at least {term} B" for term in plan.terms]
    if plan.patterns != Patterns():
        lines.append(f"demanded: {plan.patterns.named()}")
    if plan.unmeasured:
        lines.append(f"scratch not known, taken as 0: {', '.join(plan.unmeasured[:SHOWN])}")
    return lines
