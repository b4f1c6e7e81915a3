"""A step report as one HTML file that needs nothing else: no network, no library.

The file is ``page/page.html`` with, in it, the style sheet, the scripts of `_SCRIPTS` one after the other,
what `html_text` writes, and the numbers: JSON, gzip, base64 in ``<script type="text/plain" id="data">``,
read by ``page/data.js``. The JSON is an object with

- ``strings``: every text that a column has, once, in order of first use;
- ``ops`` and ``tensors``: a list for every field of `ExecutedOp` and `HeldTensor`; a text is its place in
  ``strings``;
- ``baseline``: null, or of the eager step its ``curve`` in bytes at each instant, ``peak``, ``peak_instant``
  and ``runs``, each [first instant, past the last, and where both lie over the step's instants] (`phases`);
- ``budget_bytes``, ``plan`` and ``frontier`` as in the JSON of the report.

Names of models and tensors are text to the page, never markup. The content security policy lets the page
run this one script and load nothing (https://www.w3.org/TR/CSP3/). The same report gives the same file.

Not handled: the eager step's tensors (its curve is drawn, what is alive in it is not listed).
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from remat.budget import in_units

from .html_text import details, facts, figures, frontier_table, lead
from .phases import laid_over, runs
from .step_report import ExecutedOp, HeldTensor, StepReport, Timeline

_SCRIPTS = (
    "data",
    "dom",
    "axis",
    "rows",
    "memory",
    "pointer",
    "alive",
    "ranges",
    "ranges_paint",
    "table",
    "frontier",
    "main",
)


def to_html(report: StepReport) -> str:
    """The report as an HTML page: memory over the step, live ranges, tensors and decisions.

    Args:
        report: of a plan or an analysis.
    """
    css = "\n" + _resource("page.css")
    script = "\n" + "\n".join(_resource(f"{name}.js") for name in _SCRIPTS)
    has_frontier = bool(report.frontier)
    return Template(_resource("page.html")).substitute(
        policy=_policy(script, css),
        title=escape(report.model),
        css=css,
        lead=lead(report),
        facts=facts(report),
        figures=figures(report),
        peak=in_units(report.timeline.peak),
        behind=_BEHIND if report.baseline else "",
        frontier_link='<a href="#frontier">Budget</a>' if has_frontier else "",
        frontier=frontier_table(report) if has_frontier else "",
        details=details(report),
        data=_pack(report),
        script=script,
    )


_BEHIND = '<li><i class="swatch before" aria-hidden="true"></i>eager, before planning</li>'


def _resource(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _policy(script: str, css: str) -> str:
    """Runs what has these hashes, and loads nothing."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(css)}'; base-uri 'none'; form-action 'none'"
    )


def _pack(report: StepReport) -> str:
    strings: dict[str, int] = {}
    data = {
        "ops": _columns(ExecutedOp, report.timeline.ops, strings),
        "tensors": _columns(HeldTensor, report.timeline.tensors, strings),
        "baseline": _curve(report.baseline, report.timeline) if report.baseline else None,
        "budget_bytes": report.budget_bytes,
        "plan": asdict(report.plan) if report.plan else None,
        "frontier": [asdict(point) for point in report.frontier],
        "strings": list(strings),
    }
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _columns(
    kind: type[ExecutedOp] | type[HeldTensor],
    rows: Sequence[ExecutedOp | HeldTensor],
    strings: dict[str, int],
) -> dict[str, list[int]]:
    """A list for every field.

    Args:
        kind: the type of the rows, for where there are none.
        rows: in their order.
        strings: text -> its place; new ones are added.
    """

    def number(value: Any) -> int:
        return strings.setdefault(value, len(strings)) if isinstance(value, str) else int(value)

    return {
        field.name: [number(getattr(row, field.name)) for row in rows] for field in fields(kind)
    }


def _curve(baseline: Timeline, timeline: Timeline) -> dict[str, Any]:
    edges = laid_over(baseline, timeline)
    return {
        "curve": baseline.curve,
        "peak": baseline.peak,
        "peak_instant": baseline.peak_instant,
        "runs": [
            (run.start, run.stop, edges[run.start], edges[run.stop]) for run in runs(baseline)
        ],
    }
