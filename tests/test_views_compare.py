"""A recorded snapshot beside a prediction: what was planted is what is found."""

import copy
import json
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile
from viewed import Small, op, report_of, small_reports, tensor, timelines

from remat import analyze, optimize_checkpoints
from remat.views.allocations import BLOCK, allocations, rounded
from remat.views.compare import BEFORE, UNMATCHED, SnapshotComparison, compare_snapshot
from remat.views.recording import read_snapshot, to_recording
from remat.views.snapshot import to_snapshot, write_snapshot
from remat.views.step_report import StepReport, Timeline

Snapshot = dict[str, Any]
VIZ: Any = _memory_viz  # untyped
EXTRA = 5 * 2**20 + 3
"""Bytes of no tensor of the small model."""


@pytest.fixture(scope="module", params=["planned", "eager"])
def report(request: pytest.FixtureRequest) -> StepReport:
    return small_reports()[request.param]


def recorded(report: StepReport) -> Snapshot:
    """A prediction as if it had been recorded; each event a dict of its own."""
    return copy.deepcopy(to_snapshot(report.timeline))


def made(report: StepReport) -> int:
    return sum(each.birth >= 0 for each in allocations(report.timeline))


def alloc(size: int, address: int = 1, frames: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


def freed(size: int, address: int = 1) -> list[dict[str, Any]]:
    pair = ("free_requested", "free_completed")
    return [{"action": action, "addr": address, "size": size, "frames": []} for action in pair]


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def trace_of(snapshot: Snapshot) -> list[dict[str, Any]]:
    (trace,) = snapshot["device_traces"]
    assert isinstance(trace, list)
    return trace


def peak_event(snapshot: Snapshot) -> int:
    """Number of the event before which most is allocated."""
    totals = to_recording(snapshot).totals()
    return totals.index(max(totals))


def check_sums(found: SnapshotComparison) -> None:
    assert sum(part.predicted for part in found.parts) == found.peak.predicted
    assert sum(part.measured for part in found.parts) == found.peak.measured


def assert_equal(found: SnapshotComparison, count: int) -> None:
    check_sums(found)
    assert found.difference == 0
    assert len(found.matched) == count
    assert not found.only_predicted
    assert not found.only_measured
    assert not any(each.held_longer for each in found.matched)
    assert all(part.difference == 0 for part in found.parts)


def test_a_prediction_equals_itself(report: StepReport, tmp_path: Path) -> None:
    write_snapshot(report.timeline, tmp_path / "s.pickle")
    found = compare_snapshot(read_snapshot(tmp_path / "s.pickle"), report)
    assert_equal(found, made(report))
    assert found.outside == 0
    assert [phase.name for phase in found.phases] == ["forward", "backward", "optimizer step"]
    assert [phase.difference for phase in found.phases] == [0, 0, 0]
    assert max(phase.predicted for phase in found.phases) == found.peak.predicted
    assert "equal" in str(found).splitlines()[0]


@settings(deadline=None)
@given(timelines())
def test_any_prediction_equals_itself(timeline: Timeline) -> None:
    report = report_of(timeline)
    found = compare_snapshot(to_snapshot(timeline), report)
    assert_equal(found, made(report))


def test_sizes_rounded_up_match_and_differ_by_the_rounding(report: StepReport) -> None:
    snapshot = recorded(report)
    for event in trace_of(snapshot):
        event["size"] = rounded(event["size"]) if event["size"] else 0
    for block in snapshot["segments"][0]["blocks"]:
        block["requested_size"] = block["size"]
    found = compare_snapshot(snapshot, report)
    check_sums(found)
    assert len(found.matched) == made(report)
    held = [e for e in allocations(report.timeline) if e.bytes]
    curve = [
        sum(rounded(e.bytes) for e in held if e.birth <= i <= e.death)
        for i in range(len(report.timeline.ops))
    ]
    assert found.peak.measured == max(curve)
    assert found.difference == max(curve) - report.timeline.peak > 0


def test_a_workspace_is_named_with_its_birth(report: StepReport) -> None:
    snapshot = recorded(report)
    at = peak_event(snapshot) // 2
    size = 2 * 4096 * 1024 + 8 * 16 * 1024
    stack = (
        frame("torch/csrc/Module.cpp", 1, "at::cuda::getCurrentCUDABlasHandle"),
        frame("/x/torch/nn/functional.py", 7, "linear"),
        frame("/home/me/model.py", 12, "forward"),
    )
    trace_of(snapshot).insert(at, alloc(size, frames=stack))
    found = compare_snapshot(snapshot, report)
    check_sums(found)
    assert found.difference == size
    (extra,) = found.only_measured
    assert (extra.bytes, extra.where, extra.kept) == (size, "model.py:12 forward", True)
    assert extra.at_peak
    previous = [e for e in trace_of(snapshot)[:at] if e["action"] == "alloc"][-1]
    assert previous["frames"][0]["name"].startswith(f"{extra.after} (")
    assert len(found.matched) == made(report)
    assert {part.name: part.difference for part in found.parts if part.difference} == {
        UNMATCHED: size
    }
    assert "1 x 8.52 MB  model.py:12 forward (a cuBLAS workspace has this size)" in str(found)


def test_what_is_not_allocated_is_only_predicted(report: StepReport) -> None:
    """The largest allocation of the step that is held at the peak, and is the last of its size there."""
    snapshot = recorded(report)
    instant = report.timeline.peak_instant
    at_peak = [e for e in allocations(report.timeline) if 0 <= e.birth <= instant <= e.death]
    largest = max(each.bytes for each in at_peak)
    missing = [each for each in at_peak if each.bytes == largest][-1]
    (event,) = [
        e
        for e in trace_of(snapshot)
        if e["action"] == "alloc" and e["frames"][0]["name"].startswith(f"{missing.name} (")
    ]
    lost = slice(trace_of(snapshot).index(event), None)
    frees = [e for e in trace_of(snapshot)[lost] if e["addr"] == event["addr"]][1:3]
    for each in (event, *frees):
        trace_of(snapshot).remove(each)
    found = compare_snapshot(snapshot, report)
    check_sums(found)
    (only,) = found.only_predicted
    assert (only.bytes, only.role, only.op) == (largest, missing.role, missing.op)
    assert not found.only_measured
    assert -largest <= found.difference < 0


def test_a_tensor_that_is_kept_longer_is_named() -> None:
    """Predicted: a and b one after the other. Measured: a is freed at the end."""
    held = (
        tensor("p", 10, -1, 3, "parameter"),
        tensor("a", 1000, 0, 0),
        tensor("b", 3000, 1, 1),
        tensor("c", 5000, 2, 2),
    )
    report = report_of(Timeline("eager", tuple(op(f"op_{i}") for i in range(3)), held))
    snapshot = recorded(report)
    trace = trace_of(snapshot)
    (first,) = [e for e in trace if e["action"] == "alloc" and e["size"] == 1000]
    frees = [e for e in trace if e["action"].startswith("free") and e["size"] == 1000]
    for event in (first, *frees):
        event["addr"] = 1
        if event is not first:
            trace.remove(event)
            trace.append(event)
    found = compare_snapshot(snapshot, report)
    check_sums(found)
    assert found.difference == 1000
    assert [each.name for each in found.matched if each.held_longer] == ["a"]
    assert not found.only_predicted
    assert not found.only_measured
    assert "held at the measured peak:\n  1 x 1.00 kB" in str(found)


def repeat(snapshot: Snapshot, times: int, between: list[dict[str, Any]]) -> Snapshot:
    """Steps in a row: what a step leaves behind is freed before the next begins."""
    trace = trace_of(snapshot)
    live: dict[int, dict[str, Any]] = {}
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        else:
            live.pop(event["addr"], None)
    clean = [free for e in live.values() for free in freed(e["size"], e["addr"])]
    steps = [[*trace, *clean, *between] for _ in range(times - 1)]
    events = [dict(event) for event in chain(*steps, trace)]
    return snapshot | {"device_traces": [events]}


def is_whole(report: StepReport) -> bool:
    """Whether the step frees nothing that is there before it, and so can be repeated as it is."""
    n = len(report.timeline.ops)
    return all(each.death >= n for each in report.timeline.tensors if each.birth < 0)


def test_of_three_steps_the_last_that_fits_best_is_compared(report: StepReport) -> None:
    assert is_whole(report)
    noise = [alloc(EXTRA), *freed(EXTRA)]
    snapshot = repeat(recorded(report), 3, noise)
    found = compare_snapshot(snapshot, report)
    assert_equal(found, made(report))
    assert found.outside == 2 * (made(report) + 1)


def test_what_only_the_last_step_allocates_at_its_end_is_found(report: StepReport) -> None:
    snapshot = repeat(recorded(report), 3, [])
    trace_of(snapshot).append(alloc(10 * report.timeline.peak))
    found = compare_snapshot(snapshot, report)
    check_sums(found)
    assert [each.bytes for each in found.only_measured] == [10 * report.timeline.peak]
    assert found.peak.measured > 10 * report.timeline.peak


def test_a_step_with_a_defect_is_passed_over_for_one_without(report: StepReport) -> None:
    """The first of two steps is as predicted, the second allocates more in its middle."""
    snapshot = repeat(recorded(report), 2, [])
    trace = trace_of(snapshot)
    trace.insert(len(trace) * 3 // 4, alloc(EXTRA))
    found = compare_snapshot(snapshot, report)
    assert_equal(found, made(report))
    assert found.outside == made(report) + 1


@pytest.mark.parametrize("lost", [1, 37, 400])
def test_a_history_that_has_lost_its_oldest_events(report: StepReport, lost: int) -> None:
    """The rest of a first step, and a whole one."""
    snapshot = repeat(recorded(report), 2, [])
    dropped = trace_of(snapshot)[:lost]
    snapshot["device_traces"] = [trace_of(snapshot)[lost:]]
    snapshot["allocator_settings"] = {"trace_alloc_overflowed": True}
    found = compare_snapshot(snapshot, report)
    assert_equal(found, made(report))
    assert found.outside == made(report) - sum(e["action"] == "alloc" for e in dropped)
    assert found.notes == ("the history was full: its oldest events are lost",)


def test_a_recording_that_ends_in_the_middle_of_a_step(report: StepReport) -> None:
    snapshot = repeat(recorded(report), 2, [])
    trace = trace_of(snapshot)
    whole = len(trace) // 2
    cut = [*trace[: whole + whole // 2], {"action": "oom", "size": 10**9, "device_free": 1}]
    found = compare_snapshot(snapshot | {"device_traces": [cut], "segments": []}, report)
    assert len(found.matched) == made(report)
    assert not found.only_measured
    assert found.notes == ("out of memory when 1.00 GB were asked for",)


def test_noise_of_an_allocator_changes_nothing_but_the_peak(report: StepReport) -> None:
    """Small allocations everywhere, and scratch that comes before the result instead of after it."""
    snapshot = recorded(report)
    noisy: list[dict[str, Any]] = []
    for number, event in enumerate(trace_of(snapshot)):
        noisy.append(event)
        if event["action"] == "alloc" and number % 50 == 0:
            noisy += [alloc(EXTRA, 3), *freed(EXTRA, 3)]
        noisy += [{"action": "segment_alloc", "addr": 5, "size": 2**21, "frames": []}]
    planted = sum(event.get("addr") == 3 and event["action"] == "alloc" for event in noisy)
    found = compare_snapshot(snapshot | {"device_traces": [noisy]}, report)
    check_sums(found)
    assert len(found.matched) == made(report)
    assert [each.bytes for each in found.only_measured] == [EXTRA] * planted
    assert 0 <= found.difference <= EXTRA


def test_allocations_of_an_op_may_come_in_another_order() -> None:
    held = (tensor("a", 1000, 0, 1), tensor("b", 3000, 0, 1), tensor("c", 5000, 1, 1))
    report = report_of(Timeline("eager", (op("x", scratch=9000), op("y")), held))
    snapshot = recorded(report)
    trace = trace_of(snapshot)
    trace[:3] = [trace[i] for i in (2, 1, 0)]
    found = compare_snapshot(snapshot, report)
    assert_equal(found, 4)


def test_the_device_with_the_most_allocations_is_read(report: StepReport) -> None:
    snapshot = recorded(report)
    other = [alloc(EXTRA), *freed(EXTRA)]
    snapshot["device_traces"] = [other, [], trace_of(snapshot)]
    for segment in snapshot["segments"]:
        segment["device"] = 2
    snapshot["segments"].append(
        {"device": 0, "address": 0, "total_size": BLOCK, "stream": 0}
        | {"blocks": [{"size": BLOCK, "requested_size": 9, "state": "active_allocated"}]}
    )
    found = compare_snapshot(snapshot, report)
    assert_equal(found, made(report))
    assert found.device == 2
    assert found.notes == ("2 devices were recorded; this is device 2",)


def test_json_has_every_row(report: StepReport) -> None:
    snapshot = recorded(report)
    trace_of(snapshot).insert(9, alloc(EXTRA))
    found = compare_snapshot(snapshot, report)
    data = json.loads(found.to_json())
    assert data["difference"] == found.difference
    assert len(data["matched"]) == made(report)
    assert [each["bytes"] for each in data["only_measured"]] == [EXTRA]
    assert sum(part["measured"] for part in data["parts"]) == data["peak"]["measured"]
    names = {part["name"] for part in data["parts"]}
    assert {BEFORE, UNMATCHED} <= names


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_snapshot_that_torch_made_of_a_profile_is_read(tmp_path: Path) -> None:
    """torch.cuda._memory_viz turns profiles into snapshots, on the CPU, too."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(64, 32)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as profiled:
        model(x).backward()
    snapshot = VIZ._profile_to_snapshot(profiled)
    path = tmp_path / "torch.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    report = analyze(model, (x,), optimizer="SGD").step_report()
    found = compare_snapshot(read_snapshot(path), report)
    check_sums(found)
    assert len(found.matched) > 40
    assert not found.only_predicted
    assert found.difference == 0  # on the CPU predicted bytes equal measured ones


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_was_recorded_on_a_gpu(tmp_path: Path) -> None:
    """Steady steps: the measured peak is PyTorch's own, and most of what was predicted is found."""
    torch.manual_seed(0)
    model, x = Small().cuda(), torch.randn(64, 32, device="cuda")
    planned: Any = optimize_checkpoints(model, "1GB", (x,), optimizer="AdamW")
    optimizer = torch.optim.AdamW(planned.parameters())

    def step() -> None:
        optimizer.zero_grad()
        planned(x).backward()
        optimizer.step()

    step()
    path = tmp_path / "gpu.pickle"
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    try:
        for _ in range(3):
            step()
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)
    torch.cuda.reset_peak_memory_stats()
    step()
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    found = compare_snapshot(read_snapshot(path), planned.remat.report())
    check_sums(found)
    assert found.peak.measured == requested
    forward = [m for m in found.matched if m.role == "activation"]
    assert forward
    assert len(found.matched) > len(found.only_predicted)
