"""A step as a trace for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

The format is the one of ``torch.profiler``, the JSON object form of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
    (1) ops are complete events (``X``) on four rows: forward, backward, recompute, optimizer step;
    (2) bytes are counters (``C``): by role, their sum, the budget, and the baseline's sum;
    (3) tensors are asynchronous slices (``b`` and ``e`` with one ``cat`` and ``id``), named by role and layer
        because viewers make a track for each name; the tensor's name is in ``args``.
Time: ops run one after another for their predicted time, `UNKNOWN_NS` where that is not known; ``otherData``
says for how many that is so. The baseline is laid over the step phase by phase (`phases`).

Not handled: idle time, overlap of ops, streams; a trace is a prediction, and says so.
"""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from remat.budget import in_units

from .phases import laid_over
from .step_report import HeldTensor, StepReport, Timeline

UNKNOWN_NS = 1000
"""Nanoseconds for which an op of unknown time is drawn."""
ROWS = ("forward", "backward", "recompute", "optimizer step")
_PID = 1
Events = Iterator[dict[str, Any]]


def write_trace_events(report: StepReport, path: str | os.PathLike[str]) -> None:
    """Write `to_trace_events` as JSON.

    Args:
        report: the step.
        path: of the file; compressed if it ends in ``.gz``.
    """
    data = json.dumps(to_trace_events(report)).encode()
    with open(path, "wb") as file:
        file.write(gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)


def to_trace_events(report: StepReport) -> dict[str, Any]:
    """The step as a trace; ``ts`` and ``dur`` are microseconds."""
    timeline = report.timeline
    starts = [0, *accumulate(op.time_ns or UNKNOWN_NS for op in timeline.ops)]
    timed = [
        *_ops(timeline, starts),
        *_memory(timeline, starts),
        *_lines(report, starts),
        *_live_ranges(timeline, starts),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": _metadata(report),
        "traceEvents": [*_names(report), *sorted(timed, key=lambda event: event["ts"])],
    }


def _metadata(report: StepReport) -> dict[str, str]:
    ops = report.timeline.ops
    unknown = sum(not op.time_ns for op in ops)
    baseline = report.baseline
    return {
        "what": f"prediction by remat, not a measurement: the {report.timeline.program} step",
        "model": report.model,
        "device": report.device,
        "time": f"{unknown} of {len(ops)} ops have no predicted time and are drawn for {UNKNOWN_NS} ns",
        "peak_bytes": str(report.timeline.peak),
        "baseline": f"the {baseline.program} step, laid over phase by phase"
        if baseline
        else "none",
        "notes": "; ".join(report.notes),
    }


def _names(report: StepReport) -> Events:
    name = f"{report.model}: predicted {report.timeline.program} step"
    yield {"ph": "M", "pid": _PID, "tid": 0, "name": "process_name", "args": {"name": name}}
    for tid, row in enumerate(ROWS, 1):
        thread = {"ph": "M", "pid": _PID, "tid": tid}
        yield {**thread, "name": "thread_name", "args": {"name": row}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _ops(timeline: Timeline, starts: Sequence[int]) -> Events:
    for instant, op in enumerate(timeline.ops):
        row = "recompute" if op.repeated else op.phase
        args = {
            "target": op.target,
            "module": op.module,
            "source": op.source,
            "phase": op.phase,
            "instant": instant,
            "device_bytes": timeline.curve[instant],
            "scratch_bytes": op.scratch,
            "time": "predicted" if op.time_ns else "unknown",
        }
        yield {
            "ph": "X",
            "pid": _PID,
            "tid": ROWS.index(row) + 1,
            "name": op.name,
            "cat": row,
            "ts": starts[instant] / 1000,
            "dur": (starts[instant + 1] - starts[instant]) / 1000,
            "args": args,
        }


def _memory(timeline: Timeline, starts: Sequence[int]) -> Events:
    """Counters where they change, and what is held after the step; the instant of the peak."""
    n, roles = len(timeline.ops), timeline.by_role
    points = [{role: curve[i] for role, curve in roles.items()} for i in range(n)]
    after = dict.fromkeys(roles, 0)
    for tensor in timeline.tensors:
        after[tensor.role] += tensor.bytes if tensor.death >= n else 0
    shown: dict[str, int] | None = None
    for start, point in zip(starts, [*points, after], strict=True):
        if point != shown:
            yield _counter("memory by role (bytes)", start, point)
            yield _counter("memory (bytes)", start, {"predicted": sum(point.values())})
            shown = point
    if n:
        peak = {"ph": "i", "s": "p", "pid": _PID, "tid": 0}
        start = starts[timeline.peak_instant]
        yield {**peak, "name": f"peak: {in_units(timeline.peak)}", "ts": start / 1000}


def _lines(report: StepReport, starts: Sequence[int]) -> Events:
    """The budget, and the baseline's curve over the step's time."""
    if report.budget_bytes is not None:
        for start in (starts[0], starts[-1]):
            yield _counter("budget (bytes)", start, {"budget": report.budget_bytes})
    baseline = report.baseline
    if baseline is None or not report.timeline.ops:
        return
    for position, held in zip(laid_over(baseline, report.timeline), baseline.curve, strict=False):
        instant = int(position)
        length = starts[instant + 1] - starts[instant]
        start = starts[instant] + int((position - instant) * length)
        yield _counter("baseline (bytes)", start, {baseline.program: held})


def _counter(name: str, start: int, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": _PID, "tid": 0, "name": name, "ts": start / 1000, "args": args}


def _live_ranges(timeline: Timeline, starts: Sequence[int]) -> Events:
    last = len(timeline.ops) - 1
    for number, tensor in enumerate(timeline.tensors):
        birth, death = max(tensor.birth, 0), min(tensor.death, last)
        if birth > death or not tensor.bytes:
            continue
        layer = _layer(tensor.module)
        name = f"{tensor.role}, {layer}" if layer else tensor.role
        same = {"pid": _PID, "tid": 0, "cat": "live range", "id": number, "name": name}
        yield {"ph": "b", **same, "ts": starts[birth] / 1000, "args": _described(tensor)}
        yield {"ph": "e", **same, "ts": starts[death + 1] / 1000}


def _layer(module: str) -> str:
    """The module's path up to its first number: ``transformer.h.0``; all of it if there is none."""
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _described(tensor: HeldTensor) -> dict[str, Any]:
    return {
        "tensor": tensor.name,
        "bytes": tensor.bytes,
        "type": tensor.text,
        "op": tensor.op,
        "module": tensor.module,
        "source": tensor.source,
        "decision": tensor.decision,
        "reason": tensor.reason,
    }
