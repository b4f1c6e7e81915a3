"""Snapshots open in PyTorch's viewers, and show the predicted peak."""

import copy
import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz
from viewed import op, small_reports, tensor, timelines

from remat.views.allocations import BLOCK, Event, allocations, events, place, rounded
from remat.views.snapshot import to_snapshot, write_snapshot
from remat.views.step_report import Timeline

VIZ: Any = _memory_viz  # untyped
KNOWN_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""What the unpickler of pytorch.org/memory_viz reads."""


@pytest.fixture(scope="module", params=["planned", "eager"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return small_reports()[request.param].timeline


def merged(trace: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Allocations and frees; a free is a request and, next to it, its completion."""
    pending = None
    for event in trace:
        if event["action"] == "free_requested":
            assert pending is None
            pending = event["addr"]
        elif event["action"] == "free_completed":
            assert pending == event["addr"]
            pending = None
            yield "free", event["addr"], event["size"]
        else:
            assert pending is None
            if event["action"] == "alloc":
                yield "alloc", event["addr"], event["size"]
    assert pending is None


def at_first(snapshot: dict[str, Any]) -> dict[int, int]:
    """Address -> bytes of what viewers take as there before the first event.

    That is what is freed without having been allocated, and active blocks without an allocation.
    """
    live: dict[int, int] = {}
    found: dict[int, int] = {}
    for action, address, size in merged(snapshot["device_traces"][0]):
        if action == "alloc":
            live[address] = size
        elif address in live:
            del live[address]
        else:
            assert address not in found
            found[address] = size
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in live:
                assert address not in found
                found[address] = block["requested_size"]
            address += block["size"]
    return found


def shown(snapshot: dict[str, Any]) -> list[int]:
    """The sums that viewers draw: at first, and after each event."""
    sums = [sum(at_first(snapshot).values())]
    for action, _, size in merged(snapshot["device_traces"][0]):
        sums.append(sums[-1] + (size if action == "alloc" else -size))
    return sums


@given(timelines())
def test_the_viewer_shows_the_predicted_peak_to_the_byte(timeline: Timeline) -> None:
    assert max(shown(to_snapshot(timeline))) == timeline.peak


def test_the_viewer_shows_the_predicted_peak_of_a_real_step(timeline: Timeline) -> None:
    assert timeline.peak > timeline.resident > 0
    assert max(shown(to_snapshot(timeline))) == timeline.peak


def test_the_viewer_s_sums_reach_the_curve_at_every_instant(timeline: Timeline) -> None:
    """Between two frees the sum is highest after the last allocation of an instant."""
    made = allocations(timeline)
    reached = []
    held = sum(each.bytes for each in made if each.birth < 0)
    highest: dict[int, int] = {}
    for call in events(made, len(timeline.ops)):
        each = made[call.number]
        instant = each.death if call.is_free else each.birth
        highest[instant] = max(highest.get(instant, held), held)
        held += -each.bytes if call.is_free else each.bytes
        highest[instant] = max(highest[instant], held)
        reached.append(instant)
    assert reached == sorted(reached)
    assert all(timeline.curve[instant] == most for instant, most in highest.items())


@given(timelines())
def test_live_blocks_never_overlap(timeline: Timeline) -> None:
    snapshot = to_snapshot(timeline)
    (segment,) = snapshot["segments"] or [{"address": 0, "total_size": 0}]
    live: dict[int, int] = {}

    def take(address: int, size: int) -> None:
        assert size > 0
        assert address % BLOCK == 0
        assert segment["address"] <= address
        assert address + size <= segment["address"] + segment["total_size"]
        for start, length in live.items():
            assert address + size <= start or start + length <= address
        live[address] = size

    for address, size in at_first(snapshot).items():
        take(address, size)
    for action, address, size in merged(snapshot["device_traces"][0]):
        if action == "alloc":
            take(address, size)
        else:
            assert live.pop(address) == size
    left = {each.name for each in allocations(timeline) if each.death == len(timeline.ops)}
    assert len(live) == len(left)


@given(timelines())
def test_blocks_fill_their_segment(timeline: Timeline) -> None:
    for segment in to_snapshot(timeline)["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_an_op_frees_its_scratch_before_its_operands() -> None:
    held = (tensor("a", 10, -1, 0), tensor("b", 20, 0, 1), tensor("c", 30, 0, 0))
    timeline = Timeline("eager", (op("x", scratch=40), op("y")), held)
    (trace,) = to_snapshot(timeline)["device_traces"]
    assert [(action, size) for action, _, size in merged(trace)] == [
        *(("alloc", 20), ("alloc", 30), ("alloc", 40)),
        *(("free", 40), ("free", 10), ("free", 30), ("free", 20)),
    ]


calls = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30)), max_size=40)


@given(calls)
def test_placement_is_disjoint_and_reuses_what_is_free(wanted: list[tuple[int, int]]) -> None:
    """Each allocation, and after it one of the live ones may be freed."""
    order: list[Event] = []
    held: list[int] = []
    for number, (_, freed) in enumerate(wanted):
        order.append(Event(False, number))
        held.append(number)
        if freed < len(held):
            order.append(Event(True, held.pop(freed)))
    sizes = [size for size, _ in wanted]
    offsets, total = place(sizes, order)
    live: set[int] = set()
    for event in order:
        if event.is_free:
            live.remove(event.number)
            continue
        begin, end = offsets[event.number], offsets[event.number] + sizes[event.number]
        assert all(end <= offsets[i] or offsets[i] + sizes[i] <= begin for i in live)
        assert end <= total
        live.add(event.number)
    assert total <= sum(rounded(size) for size in sizes)


def test_the_smallest_free_block_serves_and_neighbours_merge() -> None:
    a, b, c, d, e = range(5)
    made = [Event(False, i) for i in (a, b, c)]
    small, large = BLOCK, 3 * BLOCK
    offsets, total = place(
        [large, small, small, small, 4 * BLOCK],
        [*made, Event(True, a), Event(False, d), Event(True, b), Event(True, d), Event(False, e)],
    )
    assert offsets == (0, large, large + small, 0, 0)
    assert total == large + 2 * small


def test_the_pickle_is_what_the_viewer_s_unpickler_reads(
    timeline: Timeline, tmp_path: Path
) -> None:
    write_snapshot(timeline, tmp_path / "s.pickle")
    data = (tmp_path / "s.pickle").read_bytes()
    opcodes = list(pickletools.genops(data))
    assert {opcode.name for opcode, _, _ in opcodes} <= KNOWN_OPCODES
    assert next(argument for opcode, argument, _ in opcodes if opcode.name == "PROTO") == 4
    assert pickle.loads(data) == to_snapshot(timeline)


@given(timelines())
def test_an_event_has_the_category_unknown(timeline: Timeline) -> None:
    """Without it the viewer throws as soon as some event has another category."""
    (trace,) = to_snapshot(timeline)["device_traces"]
    assert "unknown" in [event["category"] for event in trace]


def test_resident_tensors_are_blocks_without_an_event(timeline: Timeline) -> None:
    snapshot = to_snapshot(timeline)
    (segment,), (trace,) = snapshot["segments"], snapshot["device_traces"]
    named = [each for each in timeline.tensors if each.birth < 0 and each.role == "parameter"]
    blocks = {
        block["frames"][0]["name"]: block["address"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    addresses = {event["addr"] for event in trace}
    for each in named:
        (address,) = [at for name, at in blocks.items() if name.startswith(f"{each.name} (")]
        assert address not in addresses


def test_frames_have_what_a_user_searches_for(timeline: Timeline) -> None:
    (trace,) = to_snapshot(timeline)["device_traces"]
    texts = [
        " ".join(f"{f['filename']}:{f['line']}:{f['name']}" for f in event["frames"])
        for event in trace
        if event["action"] == "alloc"
    ]
    made = [each for each in allocations(timeline) if each.birth >= 0]
    assert len(texts) == len(made)
    for text, each in zip(texts, made, strict=True):
        for word in (each.name, each.role, each.op, each.module, each.source, each.decision):
            assert word in text


def test_torch_reads_it(timeline: Timeline) -> None:
    snapshot = to_snapshot(timeline)
    (segment,) = snapshot["segments"]
    after = sum(each.bytes for each in allocations(timeline) if each.death == len(timeline.ops))
    allocated = VIZ.Bytes(after)
    assert f"total_allocated: {allocated}" in VIZ.segsum(snapshot)
    text = VIZ.trace(snapshot)
    assert text.count(" = ") == sum(each.birth >= 0 for each in allocations(timeline))
    assert VIZ.calc_active(segment) == segment["active_size"]
    lines: list[str] = []
    VIZ.memory(snapshot, format_flamegraph=lines.append)
    VIZ.segments(snapshot, format_flamegraph=lines.append)
    for flames in lines:
        sizes = [int(line.rpartition(" ")[2]) for line in flames.splitlines()]
        assert sum(sizes) == segment["total_size"]


def test_torch_draws_it(timeline: Timeline) -> None:
    snapshot = to_snapshot(timeline)
    assert "snapshot.pickle" in VIZ.trace_plot(snapshot)
    assert "snapshot.pickle" in VIZ.segment_plot(snapshot)
    filtered = VIZ.filter_alloc_free_pairs(copy.deepcopy(snapshot))
    left = [event for event in filtered["device_traces"][0] if event["action"] == "alloc"]
    kept = [e for e in allocations(timeline) if e.birth >= 0 and e.death == len(timeline.ops)]
    assert [event["size"] for event in left] == [each.bytes for each in kept]


@pytest.mark.parametrize("command", ["stats", "trace_plot"])
def test_torch_s_command_line_opens_it(command: str, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    write_snapshot(small_reports()["planned"].timeline, path)
    output = ["-o", str(tmp_path / "out.html")] if command.endswith("plot") else []
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", command, str(path), *output],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert (tmp_path / "out.html").read_text() if output else done.stdout
