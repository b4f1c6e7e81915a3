"""A recorded memory snapshot beside a prediction: what was predicted, what was not, what held longer.

Definitions.
    (1) The predicted sequence is `allocations`, without what is there before the step; the recorded one is
        `recording`'s. Two allocations are alike if their sizes are, rounded up to blocks of 512 bytes.
    (2) *The step* in a recording of several, or of a part of one, is the stretch of allocations with the
        smallest edit distance from the predicted sequence, the last of equals, and what is allocated after
        it until the next step begins: where the first `_HEAD` predicted allocations come again with a
        quarter of them different at the most, or the recording ends. If it is the recording's first,
        it begins with the recording's first event.
    (3) Matched are a longest common subsequence of the two sequences in the step, and of what is left,
        pairs of one size that are at most `_REACH` places out of order: kernels may allocate their scratch
        before or after their results.
    (4) Measured peak: the largest sum of allocated bytes in the step. At the peaks, what is there before the
        step is one part, the allocations of the step are parts by role: the parts add up to the peaks.

Not handled: which of several equal allocations in a row is the one that is missing (the last is named); the
allocator's rounding and reserved memory (both sides are bytes asked for).
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .alignment import best_place, common_pairs, near_pairs, next_place
from .allocations import allocations, rounded
from .recording import Recorded, Recording, to_recording
from .step_report import HeldTensor, StepReport, Timeline

BEFORE, UNMATCHED = "before the step", "only measured"
"""Parts of a peak beside the roles."""
_HEAD, _REACH = 32, 8


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure, predicted and measured."""

    name: str
    predicted: int
    """Bytes."""
    measured: int
    """Bytes."""

    @property
    def difference(self) -> int:
        """Bytes that were measured and not predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True, slots=True)
class Matched:
    """A predicted allocation that was found."""

    name: str
    role: str
    predicted: int
    """Bytes."""
    measured: int
    """Bytes."""
    source: str
    """Predicted: the user's line."""
    where: str
    """Measured: the innermost line of Python outside torch."""
    held_longer: bool
    """It is held at the measured peak, and had been freed there by the prediction."""


@dataclass(frozen=True, slots=True)
class OnlyPredicted:
    """A predicted allocation that was not found."""

    name: str
    role: str
    bytes: int
    op: str
    module: str
    source: str
    at_peak: bool
    """Held at the predicted peak."""


@dataclass(frozen=True, slots=True)
class OnlyMeasured:
    """A recorded allocation that was not predicted."""

    bytes: int
    where: str
    after: str
    """The predicted allocation that was last found before it; empty if there is none."""
    at_peak: bool
    """Held at the measured peak."""
    kept: bool
    """Not freed until the recording ends."""


@dataclass(frozen=True)
class SnapshotComparison:
    """A recorded step beside the predicted one."""

    program: str
    """Which is compared: "planned" or "eager"."""
    device: int
    """Number of the recorded device."""
    peak: Beside
    predicted_at: str
    """Op at the predicted peak."""
    measured_after: str
    """The predicted allocation that was last found before the measured peak; empty if there is none."""
    parts: tuple[Beside, ...]
    """What the peaks consist of."""
    phases: tuple[Beside, ...]
    """Peak of each phase; it begins, as measured, with its first matched allocation."""
    matched: tuple[Matched, ...]
    only_predicted: tuple[OnlyPredicted, ...]
    only_measured: tuple[OnlyMeasured, ...]
    outside: int
    """Recorded allocations before and after the step."""
    notes: tuple[str, ...]

    @property
    def difference(self) -> int:
        """Bytes by which the measured peak is above the predicted one."""
        return self.peak.difference

    def to_json(self) -> str:
        """The comparison as JSON text."""
        return json.dumps({**asdict(self), "difference": self.difference})

    def __str__(self) -> str:
        """The peaks, and what explains their difference."""
        from .compare_text import to_text

        return to_text(self)


@dataclass(frozen=True, slots=True)
class _Step:
    """The step in a recording: definition (2)."""

    recording: Recording
    allocations: Sequence[Recorded]
    begin: int
    """Event number at which it begins."""
    totals: Sequence[int]
    """Bytes allocated before each event of the recording, until the step ends."""

    @property
    def peak_at(self) -> int:
        """Event number before which most is allocated in the step."""
        return max(range(self.begin, len(self.totals)), key=self.totals.__getitem__)


def compare_snapshot(snapshot: Mapping[str, Any], report: StepReport) -> SnapshotComparison:
    """Lay a recorded snapshot beside the step that a report describes.

    Args:
        snapshot: as `recording.read_snapshot` or ``torch.cuda.memory._snapshot`` returns it.
        report: the prediction; its `timeline` is compared.

    Raises:
        ValueError: this is no snapshot, or it has no events.
    """
    timeline, recording = report.timeline, to_recording(snapshot)
    predicted = [each for each in allocations(timeline) if each.birth >= 0]
    step = _step(predicted, recording)
    peak_at = step.peak_at
    alive = [each.birth < peak_at <= each.death for each in step.allocations]
    pairs = _pairs(predicted, step.allocations)
    partner = {j: predicted[i] for i, j in pairs}
    found = [(step.allocations[j].birth, partner[j]) for j in sorted(partner)]
    last = _last_before(found, peak_at)
    now = last.birth if last else -1
    return SnapshotComparison(
        program=timeline.program,
        device=recording.device,
        peak=Beside("peak", timeline.peak, step.totals[peak_at]),
        predicted_at=timeline.ops[timeline.peak_instant].name if timeline.ops else "",
        measured_after=last.name if last else "",
        parts=_parts(timeline, step, partner),
        phases=_phases(timeline, found, step),
        matched=tuple(
            _matched(predicted[i], step.allocations[j], alive[j] and predicted[i].death < now)
            for i, j in pairs
        ),
        only_predicted=_only_predicted(predicted, {i for i, _ in pairs}, timeline.peak_instant),
        only_measured=tuple(
            _only_measured(each, _last_before(found, each.birth), alive[j], recording.events)
            for j, each in enumerate(step.allocations)
            if j not in partner
        ),
        outside=sum(e.birth >= 0 for e in recording.allocations) - len(step.allocations),
        notes=recording.notes,
    )


def _sizes(each: Sequence[HeldTensor | Recorded]) -> list[int]:
    return [rounded(one.bytes) for one in each]


def _step(predicted: Sequence[HeldTensor], recording: Recording) -> _Step:
    """Definition (2)."""
    every = [each for each in recording.allocations if each.birth >= 0]
    place = slice(0, len(every))
    if predicted:
        pattern, text = _sizes(predicted), _sizes(every)
        head = pattern[:_HEAD]
        best = best_place(pattern, text)
        following = next_place(head, text, best.stop, len(head) // 4)
        place = slice(best.start, following.start if following else len(text))
    begin = every[place.start].birth if 0 < place.start < len(every) else 0
    end = every[place.stop].birth if place.stop < len(every) else recording.events
    return _Step(recording, every[place], begin, recording.totals()[: end + 1])


def _pairs(predicted: Sequence[HeldTensor], step: Sequence[Recorded]) -> list[tuple[int, int]]:
    """Definition (3), in the predicted order."""
    pattern, text = _sizes(predicted), _sizes(step)
    pairs = common_pairs(pattern, text)
    return sorted(pairs + near_pairs(pattern, text, pairs, _REACH))


def _last_before(found: Sequence[tuple[int, HeldTensor]], event: int) -> HeldTensor | None:
    """The allocation that was last found before an event."""
    number = bisect_right(found, event - 1, key=lambda pair: pair[0])
    return found[number - 1][1] if number else None


def _parts(
    timeline: Timeline, step: _Step, partner: Mapping[int, HeldTensor]
) -> tuple[Beside, ...]:
    """Definition (4).

    Args:
        timeline: the prediction.
        step: the recorded one.
        partner: number of an allocation of the step -> the predicted allocation that it matches.
    """
    instant, peak_at = timeline.peak_instant, step.peak_at
    predicted, measured = {BEFORE: 0}, {BEFORE: 0}
    for each in allocations(timeline):
        if each.birth <= instant <= each.death:
            role = BEFORE if each.birth < 0 else each.role
            predicted[role] = predicted.get(role, 0) + each.bytes
    for one in step.recording.allocations:
        if one.birth < step.begin and one.birth < peak_at <= one.death:
            measured[BEFORE] += one.bytes
    for j, one in enumerate(step.allocations):
        if one.birth < peak_at <= one.death:
            role = partner[j].role if j in partner else UNMATCHED
            measured[role] = measured.get(role, 0) + one.bytes
    last = [UNMATCHED] if UNMATCHED in measured else []
    names = [name for name in dict.fromkeys([*predicted, *measured]) if name != UNMATCHED]
    return tuple(
        Beside(name, predicted.get(name, 0), measured.get(name, 0)) for name in [*names, *last]
    )


def _phases(
    timeline: Timeline, found: Sequence[tuple[int, HeldTensor]], step: _Step
) -> tuple[Beside, ...]:
    """Peaks by phase, in the order of the step.

    Args:
        timeline: the prediction.
        found: event number of each matched allocation, and what it matches, in order.
        step: the recorded one.
    """
    predicted: dict[str, int] = {}
    for op, held in zip(timeline.ops, timeline.curve, strict=True):
        predicted[op.phase] = max(predicted.get(op.phase, 0), held)
    begins: dict[str, int] = {}
    for event, allocation in found:
        phase = timeline.ops[allocation.birth].phase
        first = not begins and phase == timeline.ops[0].phase
        begins.setdefault(phase, step.begin if first else event)
    ends = [*begins.values(), len(step.totals) - 1][1:]
    return tuple(
        Beside(phase, predicted[phase], max(step.totals[begin : end + 1]))
        for (phase, begin), end in zip(begins.items(), ends, strict=True)
    )


def _matched(predicted: HeldTensor, measured: Recorded, held_longer: bool) -> Matched:
    sizes = predicted.bytes, measured.bytes
    places = predicted.source, measured.where
    return Matched(predicted.name, predicted.role, *sizes, *places, held_longer)


def _only_predicted(
    predicted: Sequence[HeldTensor], found: set[int], instant: int
) -> tuple[OnlyPredicted, ...]:
    return tuple(
        OnlyPredicted(
            name=each.name,
            role=each.role,
            bytes=each.bytes,
            op=each.op,
            module=each.module,
            source=each.source,
            at_peak=each.birth <= instant <= each.death,
        )
        for i, each in enumerate(predicted)
        if i not in found
    )


def _only_measured(
    each: Recorded, after: HeldTensor | None, at_peak: bool, events: int
) -> OnlyMeasured:
    name = after.name if after else ""
    return OnlyMeasured(each.bytes, each.where, name, at_peak, each.death == events)
