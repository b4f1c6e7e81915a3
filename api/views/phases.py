"""The phases of a step in a row, and a second program laid over the first phase by phase.

Definition. A *run* is a longest stretch of instants of one phase. If both programs have the same phases in a
row, the instants of a run of the second are spread evenly over the same run of the first; if not, all
instants over all of it. The two programs have different ops, so nothing finer is meant.
"""

from dataclasses import dataclass
from itertools import groupby

from .step_report import Timeline


@dataclass(frozen=True, slots=True)
class Run:
    """Instants of one phase."""

    phase: str
    start: int
    stop: int
    """First instant after it."""


def runs(timeline: Timeline) -> tuple[Run, ...]:
    """The runs of a step, in order."""
    found: list[Run] = []
    for phase, ops in groupby(timeline.ops, key=lambda op: op.phase):
        start = found[-1].stop if found else 0
        found.append(Run(phase, start, start + len(tuple(ops))))
    return tuple(found)


def laid_over(second: Timeline, first: Timeline) -> tuple[float, ...]:
    """Where the instants of the second program begin, in instants of the first.

    Returns:
        One number for each instant, and where the last ends.
    """
    theirs, ours = runs(second), runs(first)
    if [run.phase for run in theirs] != [run.phase for run in ours]:
        theirs, ours = (Run("", 0, len(second.ops)),), (Run("", 0, len(first.ops)),)
    edges = []
    for their, our in zip(theirs, ours, strict=True):
        scale = (our.stop - our.start) / max(their.stop - their.start, 1)
        edges += [our.start + scale * i for i in range(their.stop - their.start)]
    return (*edges, float(len(first.ops)))
