"""`torch.utils.checkpoint` on blocks, and Chen's √n.

A checkpointed segment keeps its inputs and its outputs. When backward first needs anything else that the
segment has computed, the segment's forward runs again, once. What lies outside of segments is saved.

Ops of a segment that no one reads again are left out, as torch's early stop does at a segment's end; so the
peer is a little better here than it is.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: √n segments of √n blocks each.
"""

from collections.abc import Iterator, Sequence
from math import isqrt

from benchmarks.step import Step
from remat.solvers import prune


def checkpoint_blocks(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Nothing, every block, and every second block checkpointed."""
    yield "no checkpointing", step.program
    yield "checkpoint every block", _recompute(step, step.blocks)
    yield "checkpoint every 2nd block", _recompute(step, step.blocks[::2])


def chen_sqrt(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Segments of about √n of the n blocks."""
    size = max(1, isqrt(len(step.blocks)))
    starts = range(0, len(step.blocks), size)
    segments = [sum(step.blocks[i : i + size], ()) for i in starts]
    yield "Chen sqrt(n)", _recompute(step, segments)


def _recompute(step: Step, segments: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The program in which each segment runs again when backward first needs what it has not kept."""
    ops = step.problem.ops
    segment_of = {v: i for i, segment in enumerate(segments) for v in segment}
    writer = {s: v for v, op in enumerate(ops) for s in op.writes}
    kept = {
        s
        for v, op in enumerate(ops[: step.border])
        for s in op.reads
        if s in writer and segment_of.get(writer[s], -1) != segment_of.get(v, -1)
    }
    executions = list(range(step.border))
    again: set[int] = set()
    for v in range(step.border, len(ops)):
        for s in ops[v].reads:
            segment = segment_of.get(writer[s], -1)
            if segment >= 0 and s not in kept and segment not in again:
                again.add(segment)
                executions += segments[segment]
        executions.append(v)
    return prune(step.problem, executions)
