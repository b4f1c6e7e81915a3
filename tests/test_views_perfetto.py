"""Traces follow the rules of the Trace Event Format, and their counters are the timeline's curves."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from viewed import op, report_of, small_reports, tensor, timelines

from remat.views.perfetto import ROWS, UNKNOWN_NS, to_trace_events, write_trace_events
from remat.views.phases import laid_over, runs
from remat.views.step_report import StepReport, Timeline

REQUIRED = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "b": {"name", "ph", "pid", "tid", "ts", "cat", "id", "args"},
    "e": {"name", "ph", "pid", "tid", "ts", "cat", "id"},
    "i": {"name", "ph", "pid", "tid", "ts", "s"},
}
Event = dict[str, Any]


@pytest.fixture(scope="module", params=["planned", "eager"])
def report(request: pytest.FixtureRequest) -> StepReport:
    return small_reports()[request.param]


def nanoseconds(microseconds: float) -> int:
    """Exact for every time that is shown; json keeps floats as they are."""
    return round(microseconds * 1000)


def events(report: StepReport, phase: str) -> list[Event]:
    trace = json.loads(json.dumps(to_trace_events(report)))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def values(report: StepReport, name: str, at: list[int]) -> list[dict[str, int]]:
    """A counter as viewers draw it: each value until the next."""
    points = {nanoseconds(e["ts"]): e["args"] for e in events(report, "C") if e["name"] == name}
    return [points[max(ts for ts in points if ts <= start)] for start in at]


def starts(report: StepReport) -> list[int]:
    found = [0]
    for each in report.timeline.ops:
        found.append(found[-1] + (each.time_ns or UNKNOWN_NS))
    return found


def check_rules(report: StepReport) -> None:
    trace = to_trace_events(report)
    assert all(isinstance(text, str) for text in trace["otherData"].values())
    rows: dict[Any, list[Event]] = defaultdict(list)
    open_slices: dict[Any, Event] = {}
    for event in trace["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]]
        if event["ph"] == "M":
            continue
        counter = event["name"] if event["ph"] == "C" else ""
        rows[event["ph"] in "be", event["tid"], counter].append(event)
        key = event.get("cat"), event.get("id")
        if event["ph"] == "b":
            assert key not in open_slices
            open_slices[key] = event
        elif event["ph"] == "e":
            begin = open_slices.pop(key)
            assert begin["name"] == event["name"]
            assert begin["ts"] < event["ts"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    assert not open_slices
    for row in rows.values():
        times = [event["ts"] for event in row]
        assert times == sorted(times)
        ops = [event for event in row if event["ph"] == "X"]
        for one, following in pairwise(ops):
            end = nanoseconds(one["ts"]) + nanoseconds(one["dur"])
            assert end <= nanoseconds(following["ts"])


@given(timelines())
def test_the_rules_of_the_format_hold(timeline: Timeline) -> None:
    check_rules(report_of(timeline, budget_bytes=100))


def test_the_rules_hold_for_a_real_step(report: StepReport) -> None:
    check_rules(report)


@given(timelines())
def test_roles_add_up_to_the_curve_at_every_instant(timeline: Timeline) -> None:
    report = report_of(timeline)
    at = starts(report)[:-1]
    roles = values(report, "memory by role (bytes)", at)
    assert [sum(each.values()) for each in roles] == list(timeline.curve)
    for role, curve in timeline.by_role.items():
        assert [each[role] for each in roles] == list(curve)
    total = values(report, "memory (bytes)", at)
    assert [each["predicted"] for each in total] == list(timeline.curve)


def test_after_the_last_op_the_counter_has_what_outlives_the_step() -> None:
    held = (tensor("a", 5, -1, 1, "parameter"), tensor("b", 7, 0, 0))
    report = report_of(Timeline("eager", (op("x"),), held))
    (after,) = values(report, "memory by role (bytes)", [UNKNOWN_NS])
    assert after == {"parameter": 5, "activation": 0, "scratch": 0}


def test_ops_run_one_after_another_on_the_row_of_their_phase(report: StepReport) -> None:
    drawn = events(report, "X")
    assert [event["name"] for event in drawn] == [each.name for each in report.timeline.ops]
    assert [nanoseconds(event["ts"]) for event in drawn] == starts(report)[:-1]
    for event, each in zip(drawn, report.timeline.ops, strict=True):
        row = "recompute" if each.repeated else each.phase
        assert ROWS[event["tid"] - 1] == row
        assert nanoseconds(event["dur"]) == (each.time_ns or UNKNOWN_NS)
    named = {
        e["tid"]: e["args"]["name"] for e in events(report, "M") if e["name"] == "thread_name"
    }
    assert named == dict(enumerate(ROWS, 1))


def test_the_planned_step_has_a_row_of_recomputation() -> None:
    rows = [ROWS[event["tid"] - 1] for event in events(small_reports()["planned"], "X")]
    assert set(rows) == set(ROWS)
    assert "recompute" not in [
        ROWS[event["tid"] - 1] for event in events(small_reports()["eager"], "X")
    ]


def test_live_ranges_are_the_timeline_s(report: StepReport) -> None:
    at, n = starts(report), len(report.timeline.ops)
    ends = {event["id"]: nanoseconds(event["ts"]) for event in events(report, "e")}
    drawn = [
        (b["args"]["tensor"], b["args"]["bytes"], nanoseconds(b["ts"]), ends[b["id"]])
        for b in events(report, "b")
    ]
    assert sorted(drawn) == sorted(
        (t.name, t.bytes, at[max(t.birth, 0)], at[min(t.death, n - 1) + 1])
        for t in report.timeline.tensors
        if t.bytes
    )


def test_live_ranges_of_a_layer_share_a_name() -> None:
    names = {event["name"] for event in events(small_reports()["planned"], "b")}
    assert {f"parameter, layers.{i}" for i in range(4)} <= names
    assert not any("weight" in name for name in names)


def test_budget_and_baseline_are_counters_of_their_own() -> None:
    report = small_reports()["planned"]
    assert report.baseline is not None
    at = starts(report)
    for each in values(report, "budget (bytes)", [at[0], at[-1]]):
        assert each == {"budget": report.budget_bytes}
    drawn = [e for e in events(report, "C") if e["name"] == "baseline (bytes)"]
    assert [event["args"]["eager"] for event in drawn] == list(report.baseline.curve)
    assert drawn[0]["ts"] == 0
    assert nanoseconds(drawn[-1]["ts"]) < at[-1]
    names = {e["name"] for e in events(small_reports()["eager"], "C")}
    assert names == {"memory by role (bytes)", "memory (bytes)"}


def test_a_phase_of_the_baseline_begins_with_the_same_phase_of_the_plan() -> None:
    first = Timeline("planned", tuple(op(str(i), p) for i, p in enumerate("aaaabb")), ())
    second = Timeline("eager", tuple(op(str(i), p) for i, p in enumerate("aabbbb")), ())
    assert laid_over(second, first) == (0, 2, 4, 4.5, 5, 5.5, 6)
    other = Timeline("eager", tuple(op(str(i), p) for i, p in enumerate("aba")), ())
    assert laid_over(other, first) == (0, 2, 4, 6)
    assert [(run.phase, run.start, run.stop) for run in runs(first)] == [("a", 0, 4), ("b", 4, 6)]


def test_the_peak_is_marked(report: StepReport) -> None:
    (mark,) = events(report, "i")
    assert nanoseconds(mark["ts"]) == starts(report)[report.timeline.peak_instant]


def test_unknown_times_are_said() -> None:
    timeline = Timeline("eager", (op("a", time_ns=2500), op("b")), ())
    trace = to_trace_events(report_of(timeline))
    assert trace["otherData"]["time"].startswith("1 of 2 ops have no predicted time")
    times = [event["args"]["time"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert times == ["predicted", "unknown"]


def test_the_suffix_says_whether_it_is_compressed(report: StepReport, tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    write_trace_events(report, plain)
    write_trace_events(report, packed)
    assert json.loads(plain.read_text()) == to_trace_events(report)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
