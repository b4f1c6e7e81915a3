"""Tables have every field of every tensor and op."""

import csv
import io
from dataclasses import fields

from hypothesis import given
from viewed import small_reports, timelines

from remat.views.step_report import ExecutedOp, HeldTensor, Timeline
from remat.views.tables import ops_csv, tensors_csv


def read(text: str) -> list[dict[str, str]]:
    assert "\r" not in text
    return list(csv.DictReader(io.StringIO(text)))


@given(timelines())
def test_a_row_for_every_tensor_and_a_column_for_every_field(timeline: Timeline) -> None:
    rows = read(tensors_csv(timeline))
    for row, tensor in zip(rows, timeline.tensors, strict=True):
        assert row == {f.name: str(getattr(tensor, f.name)) for f in fields(HeldTensor)}


@given(timelines())
def test_a_row_for_every_op_with_the_bytes_on_the_device(timeline: Timeline) -> None:
    rows = read(ops_csv(timeline))
    assert [int(row.pop("device_bytes")) for row in rows] == list(timeline.curve)
    assert [int(row.pop("instant")) for row in rows] == list(range(len(timeline.ops)))
    for row, op in zip(rows, timeline.ops, strict=True):
        assert row == {f.name: str(getattr(op, f.name)) for f in fields(ExecutedOp)}


def test_shapes_with_commas_come_back() -> None:
    timeline = small_reports()["planned"].timeline
    rows = read(tensors_csv(timeline))
    assert "f32[128, 32]" in {row["text"] for row in rows}
    assert sum(int(row["bytes"]) for row in rows if row["birth"] == "-1") == timeline.resident
