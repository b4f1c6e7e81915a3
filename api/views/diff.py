"""Why one step peaks above another: the two peaks side by side, by role, by holder, by decision.

A *holder* is all tensors of one role that the same op makes in modules that differ in numbers only,
whatever their sizes; what forward makes and what recomputation makes of it are one holder. Each step is
taken at its own peak.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from remat.budget import in_units
from remat.passes.composition import fold

from .step_report import HeldTensor, StepReport, Timeline
from .text import at_peak, where
from .units import shortened

SHOWN = 10
"""Rows of holders that are shown."""


@dataclass(frozen=True, slots=True)
class Change:
    """The same thing in both steps, bytes."""

    what: str
    before: int
    after: int

    @property
    def bytes(self) -> int:
        """How much more there is after."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Difference:
    """Two steps, each at its peak."""

    peak: Change
    """Bytes."""
    resident: Change
    """Before the step, bytes."""
    where: tuple[str, str]
    """What executes at the peaks."""
    roles: tuple[Change, ...]
    """Bytes by role at the peaks, the largest change first."""
    holders: tuple[Change, ...]
    """Bytes by holder at the peaks, the largest change first; those without a change are left out."""
    decisions: tuple[Change, ...]
    """Bytes that are recomputed, by holder, where that differs."""
    overhead: tuple[float | None, float | None]
    """Predicted; None for a step without a plan."""

    def to_json(self) -> str:
        """The difference as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def to_text(self, width: int = 100) -> str:
        """The difference in lines of at most `width` characters."""
        lines = [self._headline(), "", f"{'':<28}{'A':>12}{'B':>12}{'B - A':>12}"]
        lines += [_row(change) for change in (self.peak, *self.roles, self.resident)]
        lines += ["", f"A peaks at {self.where[0]}", f"B peaks at {self.where[1]}"]
        lines += _section("holders at the peak that differ", self.holders, width)
        lines += _section("recomputed bytes that differ", self.decisions, width)
        before, after = self.overhead
        if before is not None and after is not None:
            lines += ["", f"recomputation: A +{before:.2%}, B +{after:.2%} of the step's time"]
        return "\n".join(shortened(line, width).rstrip() for line in lines)

    def _headline(self) -> str:
        if not self.peak.bytes:
            return f"A and B peak at the same {in_units(self.peak.after)}"
        head = f"B peaks {in_units(abs(self.peak.bytes))} {'above' if self.peak.bytes > 0 else 'below'} A"
        same = [c for c in self.holders if (c.bytes > 0) is (self.peak.bytes > 0)]
        if same:
            head += f", mostly by {same[0].what} ({_signed(same[0].bytes)})"
        return head


def diff(before: StepReport, after: StepReport) -> Difference:
    """Compare two steps at their peaks."""
    a, b = before.timeline, after.timeline
    held = [_held(t) for t in (a, b)]
    made = [_recomputed(t) for t in (a, b)]
    return Difference(
        peak=Change("peak", a.peak, b.peak),
        resident=Change("before the step", a.resident, b.resident),
        where=(where(a), where(b)),
        roles=_changes(at_peak(a), at_peak(b), keep=True),
        holders=_changes(*held),
        decisions=_changes(*made),
        overhead=(
            before.plan.overhead if before.plan else None,
            after.plan.overhead if after.plan else None,
        ),
    )


def _held(timeline: Timeline) -> dict[str, int]:
    """Bytes at the peak by holder."""
    return _summed((_key(timeline, t), t.bytes) for t in timeline.alive(timeline.peak_instant))


def _recomputed(timeline: Timeline) -> dict[str, int]:
    """Bytes that repetitions make, by holder."""
    again = (t for t in timeline.tensors if t.birth >= 0 and timeline.ops[t.birth].repeated)
    return _summed((_key(timeline, t), t.bytes) for t in again if t.bytes)


def _key(timeline: Timeline, tensor: HeldTensor) -> str:
    """What a tensor is, under any plan and at any size.

    Ops of backward go by their name: eager does not know which module they belong to.
    """
    if tensor.birth < 0 or tensor.role == "gradient":
        return f"{tensor.role} {fold(tensor.name)}"
    maker = timeline.ops[tensor.birth]
    op = tensor.op.removeprefix("aten.").partition(".")[0]
    if maker.phase != "forward" and not maker.repeated:
        return f"{tensor.role} {op}"
    role = "" if tensor.role in ("activation", "temporary") else tensor.role
    place = fold(tensor.module) or tensor.source
    return " ".join(part for part in (role, place, op) if part)


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, size in pairs:
        found[key] = found.get(key, 0) + size
    return found


def _changes(
    before: dict[str, int], after: dict[str, int], *, keep: bool = False
) -> tuple[Change, ...]:
    """Pairs by name, the largest change first; those without one only if they are to be kept."""
    changes = [Change(k, before.get(k, 0), after.get(k, 0)) for k in {**before, **after}]
    return tuple(sorted((c for c in changes if keep or c.bytes), key=lambda c: -abs(c.bytes)))


def _section(title: str, changes: tuple[Change, ...], width: int) -> list[str]:
    if not changes:
        return []
    lines = ["", f"{title}:"]
    for change in changes[:SHOWN]:
        sizes = f"{in_units(change.before):>10} -> {in_units(change.after):>10}"
        head = f"  {_signed(change.bytes):>12}  {sizes}  "
        lines.append(head + shortened(change.what, max(12, width - len(head))))
    rest = changes[SHOWN:]
    if rest:
        lines.append(f"  {_signed(sum(c.bytes for c in rest)):>12}  {len(rest)} more")
    return lines


def _row(change: Change) -> str:
    return (
        f"{change.what:<28}{in_units(change.before):>12}{in_units(change.after):>12}"
        f"{_signed(change.bytes) if change.bytes else '=':>12}"
    )


def _signed(count: int) -> str:
    return ("+" if count > 0 else "") + in_units(count)
