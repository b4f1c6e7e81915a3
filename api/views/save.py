"""A step report as files: which format is said by the name's end."""

from collections.abc import Callable, Mapping
from pathlib import Path

from .figure import plot
from .html import to_html
from .perfetto import write_trace_events
from .snapshot import write_snapshot
from .step_report import StepReport
from .tables import ops_csv, tensors_csv
from .text import to_text

Writer = Callable[[StepReport, Path], None]


def _text(written: Callable[[StepReport], str]) -> Writer:
    def write(report: StepReport, path: Path) -> None:
        path.write_text(written(report), encoding="utf-8")

    return write


def _figure(report: StepReport, path: Path) -> None:
    plot(report).savefig(path, dpi=200)


WRITERS: Mapping[str, Writer] = {
    ".html": _text(to_html),
    ".trace.json": write_trace_events,
    ".trace.json.gz": write_trace_events,
    ".json": _text(StepReport.to_json),
    ".pickle": lambda report, path: write_snapshot(report.timeline, path),
    ".ops.csv": _text(lambda report: ops_csv(report.timeline)),
    ".csv": _text(lambda report: tensors_csv(report.timeline)),
    ".txt": _text(lambda report: to_text(report) + "\n"),
    ".png": _figure,
    ".svg": _figure,
    ".pdf": _figure,
}
"""End of a file's name -> what writes it; the first that fits."""
FOLDER = ("html", "json", "trace.json.gz", "pickle", "csv", "ops.csv", "txt", "png")
"""What `save_all` writes."""


def is_known(path: Path) -> bool:
    """The name says a format."""
    return path.name.endswith(tuple(WRITERS))


def save(report: StepReport, path: Path) -> None:
    """Write the report.

    Args:
        report: what to write.
        path: its name ends in .html (the page), .json (all of it), .csv (tensors), .ops.csv, .txt,
            .trace.json or .trace.json.gz (Perfetto), .pickle (PyTorch's memory viewer), or .png, .svg, .pdf
            (a figure; needs matplotlib).

    Raises:
        ValueError: the name ends in something else.
    """
    for end, write in WRITERS.items():
        if path.name.endswith(end):
            path.parent.mkdir(parents=True, exist_ok=True)
            return write(report, path)
    raise ValueError(
        f"cannot tell the format of {path}: its name should end in {', '.join(WRITERS)}"
    )


def save_all(report: StepReport, folder: Path, stem: str) -> list[Path]:
    """Write the report in all formats; without matplotlib there is no figure.

    Args:
        report: what to write.
        folder: made if it is not there.
        stem: name of the files.
    """
    written = []
    for end in FOLDER:
        path = folder / f"{stem}.{end}"
        try:
            save(report, path)
        except ModuleNotFoundError:  # matplotlib is an extra
            continue
        written.append(path)
    return written
