"""A comparison of a recorded snapshot with a prediction as text: the peaks, and what explains the difference.

Equal rows are counted. Bytes are `budget.in_units`'. Not handled: every row; `to_json` has all.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from remat.budget import in_units
from remat.passes.composition import fold
from remat.passes.device_memory import LARGE_WORKSPACE, SMALL_WORKSPACE

if TYPE_CHECKING:
    from .compare import Beside, OnlyMeasured, OnlyPredicted, SnapshotComparison

_SHOWN = 12
"""Rows of each list."""
_WORKSPACES = (SMALL_WORKSPACE, LARGE_WORKSPACE)


def to_text(comparison: "SnapshotComparison") -> str:
    """The comparison, to be read."""
    c = comparison
    missing, extra = c.only_predicted, c.only_measured
    lines = [
        f"peak of the {c.program} step: predicted {in_units(c.peak.predicted)}, "
        f"measured {in_units(c.peak.measured)}: {_difference(c.difference)}",
        f"predicted in {c.predicted_at or '-'}; measured after {c.measured_after or '-'}",
        *_table("at the peak", c.parts),
        *_table("peak by phase", c.phases),
        "",
        f"{len(c.matched):,} of {len(c.matched) + len(missing):,} predicted allocations were found; "
        f"{len(missing):,} only predicted, {len(extra):,} only measured",
        *_list("only measured", map(_extra, extra)),
        *_list("only predicted", map(_missing, missing)),
        *_list(
            "freed by the prediction, but held at the measured peak",
            ((m.measured, f"{m.role} {m.source}", m.name) for m in c.matched if m.held_longer),
        ),
    ]
    if c.outside:
        lines += ["", f"{c.outside:,} recorded allocations are before or after the step"]
    return "\n".join([*lines, *(f"note: {note}" for note in c.notes)])


def _difference(count: int) -> str:
    if not count:
        return "equal"
    return f"{in_units(abs(count))} {'more' if count > 0 else 'less'} than predicted"


def _table(title: str, rows: Iterable["Beside"]) -> list[str]:
    lines = ["", f"{title:<24}{'predicted':>12}{'measured':>12}{'difference':>12}"]
    for row in rows:
        figures = (row.predicted, row.measured, row.difference)
        lines.append(f"  {row.name:<22}" + "".join(f"{in_units(each):>12}" for each in figures))
    return lines


def _list(title: str, rows: Iterable[tuple[int, str, str]]) -> list[str]:
    """Rows alike as one, those with the most bytes first.

    Args:
        title: of the list.
        rows: bytes, what it is, and more of which only the first of rows alike is shown.
    """
    alike: dict[tuple[int, str], list[str]] = {}
    for size, text, more in rows:
        alike.setdefault((size, text), []).append(more)
    if not alike:
        return []
    ordered = sorted(alike.items(), key=lambda item: -item[0][0] * len(item[1]))
    lines = ["", f"{title}:"]
    for (size, text), members in ordered[:_SHOWN]:
        named = f"{'first ' if len(members) > 1 else ''}{members[0]}"
        lines.append(f"  {len(members)} x {in_units(size)}  {text}; {named}")
    rest = ordered[_SHOWN:]
    if rest:
        count = sum(len(members) for _, members in rest)
        held = sum(size * len(members) for (size, _), members in rest)
        lines.append(f"  and {count:,} more of {in_units(held)} together")
    return lines


def _extra(each: "OnlyMeasured") -> tuple[int, str, str]:
    words = [each.where or "no stack recorded"]
    words += ["(a cuBLAS workspace has this size)"] if each.bytes in _WORKSPACES else []
    words += ["not freed"] if each.kept else []
    return each.bytes, _row(*words, _peak(each.at_peak)), f"after {each.after or 'the start'}"


def _missing(each: "OnlyPredicted") -> tuple[int, str, str]:
    words = (each.role, fold(each.module), each.op, each.source, _peak(each.at_peak))
    return each.bytes, _row(*words), each.name


def _row(*words: str) -> str:
    return " ".join(word for word in words if word)


def _peak(held: bool) -> str:
    return "[at the peak]" if held else ""
