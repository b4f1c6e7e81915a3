"""A memory snapshot that PyTorch recorded on a GPU, read back as a sequence of allocations.

Reads what ``torch.cuda.memory._dump_snapshot`` writes after ``_record_memory_history()`` (the docstring of
``torch.cuda.memory._snapshot`` has the format), what ``torch.cuda._memory_viz`` makes of profiles, and what
`snapshot` writes.
    (1) Bytes are those asked for. They count from ``alloc`` to the first of ``free_requested``,
        ``free_completed`` and ``free`` at the same address: as ``torch.cuda.memory_allocated`` counts,
        without its rounding.
    (2) What is freed without having been allocated, and a block that is ``active_allocated`` at the end
        without an event, was there when the recording began. So a recording whose oldest events are lost is
        right from the first event that it has.
    (3) Of several devices the one with the most allocations is read.
    (4) Only plain containers are loaded: a pickle that asks for any class or function is refused unread.

Not handled: the segments of the allocator, streams, several devices at once.
"""

import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, Any

from remat.budget import in_units

_FREES = ("free_requested", "free_completed", "free")
_SILENT = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot")
_RECORD = "torch.cuda.memory._record_memory_history()"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One allocation of a recording."""

    bytes: int
    birth: int
    """Number of the event that makes it; -1: there when the recording begins."""
    death: int
    """Number of the event that frees it; the number of events: not freed."""
    where: str
    """Innermost line of Python that is not torch's, ``file.py:12 function``; empty if there is no stack."""


@dataclass(frozen=True)
class Recording:
    """What one device allocated."""

    device: int
    events: int
    """Number of events."""
    allocations: tuple[Recorded, ...]
    """Those from before the recording, then the others as they were made."""
    notes: tuple[str, ...]
    """What a reader should know, a sentence each."""

    def totals(self) -> list[int]:
        """Bytes allocated before each event, and at the end."""
        change = [0] * (self.events + 1)
        for each in self.allocations:
            change[each.birth + 1] += each.bytes
            if each.death < self.events:
                change[each.death + 1] -= each.bytes
        return list(accumulate(change))


class _Plain(pickle.Unpickler):
    """Refuses everything that is looked up by name, and so all code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside")


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a snapshot without running any code that a pickle may ask for.

    Args:
        path: of the file.

    Raises:
        ValueError: it is no memory snapshot, or holds more than plain containers.
    """
    with open(path, "rb") as file:
        return _load(file, os.fspath(path))


def _load(file: IO[bytes], name: str) -> dict[str, Any]:
    try:
        found = _Plain(file).load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(
            f"{name} cannot be read as a memory snapshot of plain containers: {error}"
        ) from error
    _check(found)
    return dict(found)


def _check(snapshot: Any) -> None:
    """Raise unless it has the outline of a snapshot."""
    keys = ("segments", "device_traces")
    if not isinstance(snapshot, Mapping) or not all(
        isinstance(snapshot.get(key), list) for key in keys
    ):
        raise ValueError(
            "this is no memory snapshot: it should be a dict with lists 'segments' and "
            "'device_traces', as torch.cuda.memory._dump_snapshot writes it"
        )
    if not any(snapshot["device_traces"]):
        raise ValueError(f"the snapshot holds no events: call {_RECORD} before the step")


def to_recording(snapshot: Mapping[str, Any]) -> Recording:
    """Definitions (1) to (3).

    Args:
        snapshot: as `read_snapshot` or ``torch.cuda.memory._snapshot`` returns it.

    Raises:
        ValueError: it is no snapshot, or has no events.
    """
    _check(snapshot)
    traces = snapshot["device_traces"]
    try:
        counts = [sum(event["action"] == "alloc" for event in trace) for trace in traces]
        device = max(range(len(traces)), key=lambda i: (counts[i], len(traces[i]), -i))
        allocations = _follow(traces[device], snapshot["segments"], device)
        notes = _notes(snapshot, traces[device], sum(map(bool, traces)), device)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"this memory snapshot is damaged: {error!r}") from error
    return Recording(device, len(traces[device]), allocations, notes)


def _follow(
    trace: list[dict[str, Any]], segments: list[dict[str, Any]], device: int
) -> tuple[Recorded, ...]:
    n = len(trace)
    before: list[Recorded] = []
    made: list[tuple[int, dict[str, Any]]] = []  # event number and event
    deaths: dict[int, int] = {}  # event number of the allocation -> of its free
    live: dict[int, int] = {}  # address -> event number
    requested: set[int] = set()  # addresses whose free was asked for since they were allocated
    for number, event in enumerate(trace):
        action = event["action"]
        if action == "alloc":
            if event["addr"] in live:  # its free was not recorded
                deaths[live[event["addr"]]] = number
            requested.discard(event["addr"])
            live[event["addr"]] = number
            made.append((number, event))
        elif action in _FREES:
            address = event["addr"]
            if action == "free_completed" and address in requested:
                continue
            if action == "free_requested":
                requested.add(address)
            if address in live:
                deaths[live.pop(address)] = number
            else:
                before.append(Recorded(event["size"], -1, number, ""))
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"] if segment.get("device", device) == device else ():
            if block["state"] == "active_allocated" and address not in live:
                history = block.get("history") or [{}]  # of snapshots by old versions of torch
                size = block.get("requested_size", history[0].get("real_size", block["size"]))
                before.append(Recorded(size, -1, n, _where(block.get("frames", []))))
            address += block["size"]
    steps = (
        Recorded(event["size"], number, deaths.get(number, n), _where(event.get("frames", [])))
        for number, event in made
    )
    return (*before, *steps)


def _where(frames: list[dict[str, Any]]) -> str:
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    users = [frame for frame in python if "/torch/" not in frame["filename"]]
    for frame in (*users[:1], *python[:1]):
        file = str(frame["filename"]).rpartition("/")[2]
        return f"{file}:{frame['line']} {frame['name']}"
    return str(frames[0]["name"]) if frames else ""


def _notes(
    snapshot: Mapping[str, Any], trace: list[dict[str, Any]], devices: int, device: int
) -> tuple[str, ...]:
    notes = []
    if devices > 1:
        notes.append(f"{devices} devices were recorded; this is device {device}")
    settings = snapshot.get("allocator_settings") or {}
    if settings.get("trace_alloc_overflowed"):
        notes.append("the history was full: its oldest events are lost")
    for event in trace:
        if event["action"] == "oom":
            notes.append(f"out of memory when {in_units(event['size'])} were asked for")
    known = ("alloc", "oom", *_FREES, *_SILENT)
    unknown = Counter(str(e["action"]) for e in trace if e["action"] not in known)
    notes += [f"events {name!r} are not understood: {n} of them" for name, n in unknown.items()]
    return tuple(notes)
