"""The commands that read files: report, diff, compare. None needs torch."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .budget import in_units
from .cli_target import UsageError, add_command, width
from .views.step_report import StepReport


def add_report(commands: Any) -> None:
    """Add ``report``."""
    parser = add_command(
        commands,
        "report",
        "a saved report as text, as a page, or for another viewer",
        "Show a report that `plan --report`, `analyze --report` or `StepReport.save` has written. With -o "
        "it is written in the format that the name ends in: .html, .json, .csv, .ops.csv, .txt, "
        ".trace.json(.gz) for Perfetto, .pickle for PyTorch's memory viewer, .png, .svg or .pdf.",
        ["report out/planned.json", "report out/planned.json -o plan.html -o plan.pickle"],
    )
    parser.add_argument("file", help="a report as JSON")
    parser.add_argument(
        *("-o", "--output"),
        action="append",
        default=[],
        metavar="FILE",
        help="write it; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(command=report)


def add_diff(commands: Any) -> None:
    """Add ``diff``."""
    parser = add_command(
        commands,
        "diff",
        "why one step peaks above another",
        "Lay the peaks of two reports side by side: by role, by what holds the bytes, by what is recomputed. "
        "With one report, its eager step is A and its plan is B.",
        ["diff a.json b.json", "diff out/planned.json"],
    )
    parser.add_argument("before", metavar="A", help="a report as JSON")
    parser.add_argument("after", metavar="B", nargs="?", help="another")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(command=diff)


def add_compare(commands: Any) -> None:
    """Add ``compare``."""
    parser = add_command(
        commands,
        "compare",
        "a snapshot taken on a GPU beside a prediction",
        "Read what torch.cuda.memory._dump_snapshot has written, and lay it beside a report: which "
        "allocations were predicted, which were not, and what that makes of the peak.",
        ["compare snapshot.pickle out/planned.json"],
    )
    parser.add_argument("snapshot", help="a snapshot, as pickle")
    parser.add_argument("file", metavar="report", help="a report as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(command=compare)


def report(arguments: argparse.Namespace) -> int:
    """Print or write a report."""
    from .views.save import WRITERS, is_known, save
    from .views.text import to_text

    read = _read(arguments.file)
    if unknown := [name for name in arguments.output if not is_known(Path(name))]:
        raise UsageError(f"-o {unknown[0]}: the name should end in {', '.join(WRITERS)}")
    for name in arguments.output:
        save(read, Path(name))
        print(f"remat: wrote {name}", file=sys.stderr)
    if arguments.json:
        print(read.to_json())
    elif not arguments.output:
        print(to_text(read, width()))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Print what differs at the peaks."""
    from .views.diff import diff as differing

    after = _read(arguments.after or arguments.before)
    before = _read(arguments.before)
    if not arguments.after:
        if before.baseline is None:
            raise UsageError(
                f"{arguments.before} has no plan beside the eager step: name two reports"
            )
        before = replace(before, timeline=before.baseline, baseline=None, plan=None)
    found = differing(before, after)
    if arguments.json:
        print(found.to_json())
    else:
        print(f"A: {_named(before)}\nB: {_named(after)}\n\n{found.to_text(width())}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Print a measurement beside a prediction."""
    from .views.compare import compare_snapshot
    from .views.recording import read_snapshot

    found = compare_snapshot(read_snapshot(Path(arguments.snapshot)), _read(arguments.file))
    print(found.to_json() if arguments.json else str(found))
    return 0


def _named(report: StepReport) -> str:
    """Which step a report is of, in a line."""
    sizes = "".join(f", {name}={size}" for name, size in report.sizes.items())
    budget = (
        f" under {in_units(report.budget_bytes)}" if report.plan and report.budget_bytes else ""
    )
    return f"{report.model} on {report.device}{sizes}, {report.timeline.program}{budget}"


def _read(name: str) -> StepReport:
    try:
        return StepReport.from_json(Path(name).read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{name} is no step report ({error}). `remat plan --report DIR` writes one, DIR/planned.json"
        ) from error
