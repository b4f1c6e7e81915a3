"""A predicted step as a memory snapshot of PyTorch, for the viewers of such snapshots.

The format is that of ``torch.cuda.memory._snapshot`` (its docstring), as ``torch/cuda/_memory_viz.py`` and
https://pytorch.org/memory_viz (``torch/utils/viz/MemoryViz.js``) read it. What the latter asks for:
    (1) Pickle protocol 4 or less; dicts, lists, tuples, strings, ints only.
    (2) A free is ``free_requested`` and, next, ``free_completed``.
    (3) What is there before the step, and is not freed, has no event: it is an ``active_allocated`` block of
        the segment. Addresses of blocks are sums of sizes, so gaps are ``inactive`` blocks.
    (4) If an event has a category, some event has the category "unknown".
Event sizes are bytes asked for, as PyTorch records them, so the largest sum that viewers show is the
timeline's peak. Order of events and addresses: `allocations`.

Not handled: times (viewers draw events one after another), the segments of the real allocator, other devices
than number 0, two programs in one file.
"""

import os
import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any

from .allocations import Event, allocations, events, place, rounded
from .step_report import HeldTensor, Timeline

_BASE = 0x7F00_0000_0000
"""Address of the segment: as on a GPU, and small enough to be exact in JavaScript."""
_PROTOCOL = 4
_POOL = (0, 0)
"""The allocator's default pool."""


def write_snapshot(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write `to_snapshot` as a pickle.

    Args:
        timeline: the step.
        path: of the file; by convention it ends in ``.pickle``.
    """
    with open(path, "wb") as file:
        pickle.dump(to_snapshot(timeline), file, protocol=_PROTOCOL)


def to_snapshot(timeline: Timeline) -> dict[str, Any]:
    """The step as ``torch.cuda.memory._snapshot`` would return it after it."""
    n = len(timeline.ops)
    made = allocations(timeline)
    calls = list(events(made, n))
    before = (Event(False, number) for number, each in enumerate(made) if each.birth < 0)
    offsets, total = place([each.bytes for each in made], chain(before, calls))
    frames = [_frames(each) for each in made]
    trace: list[dict[str, Any]] = []
    for call in calls:
        for action in ("free_requested", "free_completed") if call.is_free else ("alloc",):
            trace.append(
                {
                    "action": action,
                    "addr": _BASE + offsets[call.number],
                    "size": made[call.number].bytes,
                    "stream": 0,
                    "pool_id": _POOL,
                    "frames": frames[call.number],
                    "category": made[call.number].role,
                }
            )
    last = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []}
    trace.append({**last, "category": "unknown"})
    held = sorted((offsets[i], i) for i, each in enumerate(made) if each.death >= n)
    blocks = _blocks([(offset, made[i].bytes, frames[i]) for offset, i in held], total)
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0,
        "address": _BASE,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(made[i].bytes for _, i in held),
        "frames": [],
        "blocks": blocks,
    }
    return {"segments": [segment] if total else [], "device_traces": [trace]}


def _blocks(held: Sequence[tuple[int, int, Any]], total: int) -> list[dict[str, Any]]:
    """The segment's blocks after the step.

    Args:
        held: offset, bytes and frames of what is allocated, by offset.
        total: bytes of the segment.
    """
    blocks: list[dict[str, Any]] = []
    end = 0

    def block(size: int, state: str, requested: int, frames: Any) -> None:
        found = {"address": _BASE + end, "size": size, "requested_size": requested}
        blocks.append({**found, "state": state, "frames": frames})

    for offset, size, frames in [*held, (total, 0, [])]:
        if offset > end:
            block(offset - end, "inactive", 0, [])
            end = offset
        if size:
            block(rounded(size), "active_allocated", size, frames)
            end += rounded(size)
    return blocks


def _frames(each: HeldTensor) -> list[dict[str, Any]]:
    """A "stack", innermost first: viewers search it, and flame graphs group by it."""
    file, _, line = each.source.rpartition(":")
    if not line.isdigit():
        file, line = each.source, "0"
    found = [
        (file or "tensor", int(line), f"{each.name} ({' '.join((each.role, each.text)).strip()})")
    ]
    found += [("decision", 0, f"{each.decision}: {each.reason}")] if each.decision else []
    found += [("op", 0, each.op)] if each.op else []
    found += [("module", 0, each.module)] if each.module else []
    return [{"filename": file, "line": line, "name": name} for file, line, name in found]
