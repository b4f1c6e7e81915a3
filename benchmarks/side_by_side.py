"""Plans of `remat` beside those of other systems, on the same graphs: one command, one table, one run.

    python -m benchmarks.side_by_side [--models gpt2,resnet50] [--time-limit 20] [--json FILE] [--write-docs]

For every model, each peer gives programs on the same joint graph, and all are judged by the same evaluator
(see `step.py`). Of the peaks that some peer reaches at less time than every other, a few are taken: each
peer's least peak, and others spread between the least and the greatest. Each is then our budget. A table
has, at each of them, the cheapest peer that needs no more, our plan with its proven bound, and our greedy.

Prints Markdown, and writes it into docs/benchmarks.md if asked to. A peak counts parameters, batch, gradients
and activations, but no optimizer state.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remat.ir import UnsupportedGraphError
from remat.solvers import Limits

from .comparison import Comparison, Row, compare
from .real_models import CASES

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARKS = ("<!-- begin: benchmarks.side_by_side -->", "<!-- end: benchmarks.side_by_side -->")
LEAST = 1e-3
"""In ratios, no overhead is taken to be less than this fraction of a step."""


def table(comparison: Comparison) -> str:
    """Markdown of one model."""
    case = comparison.case
    lines = [
        f"### {case.name}: {case.text}",
        "",
        f"{comparison.ops} ops; {_gb(comparison.resident)} resident; "
        f"as it is the step peaks at {_gb(comparison.eager_peak)}.",
        "",
        "| peak | reached by | best peer | ours | bound | s | our greedy | s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in comparison.rows:
        mark = " **worse**" if row.worse else ""
        lines.append(
            f"| {_gb(row.budget)} | {row.reached_by} | {_percent(row.peer_overhead)} "
            f"| {_percent(row.overhead)}{mark} | {_percent(row.bound)} | {row.seconds:.1f} "
            f"| {_percent(row.greedy_overhead)} | {row.greedy_seconds:.1f} |"
        )
    least = sorted(comparison.least_of_peers().items(), key=lambda item: item[1])
    texts = [f"{peer} {_gb(peak)}" for peer, peak in least]
    lines += [
        "",
        f"Least peak: ours {_gb(comparison.least)} ({comparison.least_s:.1f} s); {', '.join(texts)}.",
        "",
    ]
    return "\n".join(lines)


def summary(comparisons: Sequence[Comparison]) -> str:
    """Markdown of all models together."""
    rows = [row for comparison in comparisons for row in comparison.rows]
    ours = [r for r in rows if math.isfinite(r.overhead)]
    beside = [r for r in ours if math.isfinite(r.greedy_overhead)]
    lines = [
        "| | |",
        "| --- | ---: |",
        f"| budgets compared | {len(rows)} |",
        f"| a peer is better than we are | {sum(r.worse for r in rows)} |",
        f"| our overhead over the best peer's, geometric mean | {_mean_ratio(ours):.2f} |",
        f"| our greedy's overhead over the best peer's, geometric mean | "
        f"{_mean_ratio(beside, 'greedy_overhead'):.2f} |",
        f"| our overhead over our greedy's, geometric mean | "
        f"{_mean_ratio(beside, 'overhead', 'greedy_overhead'):.2f} |",
        f"| budgets at which our greedy finds nothing | {len(rows) - len(beside)} |",
        f"| proven optimal (for the order of first executions) | "
        f"{sum(r.status == 'optimal' for r in rows)} |",
    ]
    for comparison in comparisons:
        peer = min(comparison.least_of_peers().values())
        lines.append(
            f"| least peak over the best peer's, {comparison.case.name} "
            f"| {comparison.least / peer:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _mean_ratio(
    rows: Sequence[Row], ours: str = "overhead", theirs: str = "peer_overhead"
) -> float:
    """Geometric mean of the ratio of overheads, none taken to be below `LEAST`."""
    logs = [
        math.log(max(getattr(row, ours), LEAST) / max(getattr(row, theirs), LEAST)) for row in rows
    ]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %" if math.isfinite(part) else "none"


def _records(comparison: Comparison) -> Iterable[dict[str, Any]]:
    """One line of JSON for each row, each peer's program, and the model."""
    model = comparison.case.name
    for row in comparison.rows:
        yield {"kind": "row", **asdict(row)}
    for point in comparison.points:
        yield {
            "kind": "peer",
            "model": model,
            "peer": point.peer,
            "label": point.label,
            "peak": point.peak,
            "overhead": point.overhead,
            "seconds": point.seconds,
        }
    yield {
        "kind": "model",
        "model": model,
        "ops": comparison.ops,
        "resident": comparison.resident,
        "eager_peak": comparison.eager_peak,
        "least": comparison.least,
        "least_seconds": comparison.least_s,
        "capture_seconds": comparison.capture_s,
    }


def _write_docs(text: str) -> None:
    """Replace what stands between the marks."""
    page = DOCS.read_text()
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    DOCS.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run, print, and write; return the exit status."""
    parser = argparse.ArgumentParser(description="plans of remat beside those of other systems")
    names = [case.name for case in CASES]
    parser.add_argument("--models", default=",".join(names), help="of: " + ", ".join(names))
    parser.add_argument(
        "--device", default="a100-80gb", help="whose kernels and speed are planned"
    )
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for one plan")
    parser.add_argument("--peaks", type=int, default=4, help="budgets beside the least peaks")
    parser.add_argument("--json", type=Path, help="file for all figures, one JSON object a line")
    parser.add_argument("--write-docs", action="store_true", help="put it into docs/benchmarks.md")
    arguments = parser.parse_args()
    wanted = arguments.models.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--models: {', '.join(unknown)} is none of {', '.join(names)}")
    limits = Limits(time_s=arguments.time_limit)
    if arguments.json:
        arguments.json.write_text("")
    done: list[Comparison] = []
    texts: list[str] = []
    for case in CASES:
        if case.name not in wanted:
            continue
        try:
            _, found = compare(case, arguments.device, limits, arguments.peaks, _progress)
        except UnsupportedGraphError as error:
            texts.append(f"### {case.name}: {case.text}\n\nNot captured: {error}\n")
            print(texts[-1], flush=True)
            continue
        done.append(found)
        texts.append(table(found))
        print(texts[-1], flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in _records(found))
    texts.insert(0, summary(done))
    print(texts[0])
    if arguments.write_docs:
        _write_docs("\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
