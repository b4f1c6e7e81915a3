"""A predicted step as tables: comma-separated values (RFC 4180, but lines end in a line feed).

One row for each tensor or op, one column for each field of `HeldTensor` or `ExecutedOp`; bytes and
times are whole numbers. Not handled: the other parts of a report; its JSON has them.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields

from .step_report import ExecutedOp, HeldTensor, Timeline


def tensors_csv(timeline: Timeline) -> str:
    """One row for each tensor, in the order of the timeline."""
    columns = [field.name for field in fields(HeldTensor)]
    return _csv(columns, (astuple(tensor) for tensor in timeline.tensors))


def ops_csv(timeline: Timeline) -> str:
    """One row for each executed op: its instant, its fields, and the bytes on the device while it runs."""
    columns = ["instant", *(field.name for field in fields(ExecutedOp)), "device_bytes"]
    rows = enumerate(zip(timeline.ops, timeline.curve, strict=True))
    return _csv(columns, ((instant, *astuple(op), held) for instant, (op, held) in rows))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
