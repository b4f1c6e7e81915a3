import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from pages import complete, deep
from viewed import report_of, small_reports, timelines

from remat.views.html import to_html
from remat.views.mathml import to_mathml
from remat.views.phases import laid_over, runs
from remat.views.step_report import (
    ExecutedOp,
    HeldTensor,
    PlanFigures,
    Point,
    StepReport,
    Timeline,
)


def unpacked(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert found
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


def rows_of(kind: type[Any], columns: dict[str, list[int]], strings: list[str]) -> tuple[Any, ...]:
    """What the columns were made of."""
    typed: dict[str, Callable[[int], Any]] = {"str": strings.__getitem__, "int": int, "bool": bool}
    read = [
        [typed[kind.__annotations__[name].__name__](v) for v in c] for name, c in columns.items()
    ]
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in zip(*read, strict=True))


def assert_unpacks(report: StepReport) -> None:
    data = unpacked(to_html(report))
    strings = data["strings"]
    assert rows_of(ExecutedOp, data["ops"], strings) == report.timeline.ops
    assert rows_of(HeldTensor, data["tensors"], strings) == report.timeline.tensors
    assert len(set(strings)) == len(strings)
    assert data["budget_bytes"] == report.budget_bytes
    assert [Point(**point) for point in data["frontier"]] == list(report.frontier)
    assert (PlanFigures(**data["plan"]) if data["plan"] else None) == report.plan
    if report.baseline is None:
        assert data["baseline"] is None
        return
    baseline = data["baseline"]
    assert tuple(baseline["curve"]) == report.baseline.curve
    assert (baseline["peak"], baseline["peak_instant"]) == (
        report.baseline.peak,
        report.baseline.peak_instant,
    )
    edges = laid_over(report.baseline, report.timeline)
    for run, (start, stop, begin, end) in zip(
        runs(report.baseline), baseline["runs"], strict=True
    ):
        assert (start, stop) == (run.start, run.stop)
        assert (begin, end) == (edges[start], edges[stop])


def test_the_data_of_a_page_are_those_of_the_report() -> None:
    assert_unpacks(complete())
    assert_unpacks(small_reports()["eager"])


@given(timelines())
@settings(max_examples=50, deadline=None)
def test_the_data_of_any_page_are_those_of_the_report(timeline: Timeline) -> None:
    assert_unpacks(report_of(timeline, baseline=timeline))


def test_the_same_report_gives_the_same_page() -> None:
    report = complete()
    assert to_html(report) == to_html(StepReport.from_json(report.to_json()))


def test_a_page_refers_to_nothing_outside() -> None:
    page = to_html(complete())
    assert not re.search(
        r"""(src|href|action|data)\s*=\s*["'](?!#)|url\(|@import|https?:(?!//www\.w3\.org/2000/svg")""",
        page,
    )


def test_the_policy_lets_exactly_this_script_and_style_run() -> None:
    page = to_html(complete())
    for kind, tag in (("script", r'script type="module"'), ("style", "style")):
        content = re.search(f"<{tag}>(.*?)</{kind}>", page, re.DOTALL)
        assert content
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


MACHADO = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of color vision deficiency"
(2009), table 1, severity 1.0; linear RGB."""
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
"""Of linear sRGB (IEC 61966-2-1)."""


def lab(colour: str, deficiency: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE 1976 L*a*b* of a colour as it is seen."""

    def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb]
    seen = [min(max(c, 0), 1) for c in times(deficiency, linear)]
    white = times(XYZ, [1.0, 1.0, 1.0])
    ratios = [a / b for a, b in zip(times(XYZ, seen), white, strict=True)]
    x, y, z = (r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("deficiency", sorted(MACHADO))
def test_colours_of_roles_stay_apart_for_the_colour_blind(deficiency: str) -> None:
    """18 is about 8 just noticeable differences (2.3 of CIE 1976 each)."""
    page = to_html(small_reports()["eager"])
    names = ("parameter", "state", "other", "gradient", "activation", "temporary")
    themes = list(
        zip(*(re.findall(rf"--{name}: (#\w{{6}});", page) for name in names), strict=True)
    )
    assert len(themes) == 2
    for theme in themes:
        seen = [lab(colour, MACHADO[deficiency]) for colour in theme]
        assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 18


def test_a_page_of_48_layers_is_below_2_megabytes() -> None:
    report = deep()
    assert len(report.timeline.ops) > 11_000
    assert len(report.timeline.tensors) > 11_000
    assert len(to_html(report).encode()) < 2_000_000


@pytest.mark.parametrize(
    ("text", "mathml"),
    [
        ("4,096", "<mn>4,096</mn>"),
        ("8·batch", "<mrow><mn>8</mn><mo>·</mo><mi>batch</mi></mrow>"),
        ("s**2", "<msup><mi>s</mi><mn>2</mn></msup>"),
        ("-s + 1", "<mrow><mo>−</mo><mi>s</mi><mo>+</mo><mn>1</mn></mrow>"),  # noqa: RUF001
        ("a/2", "<mfrac><mi>a</mi><mn>2</mn></mfrac>"),
        ("floor(a)", "<mrow><mo>⌊</mo><mi>a</mi><mo>⌋</mo></mrow>"),
        ("Max(a, 4,096)", "<mrow><mi>max</mi><mo>(</mo><mi>a</mi><mo>,</mo><mn>4,096</mn><mo>)</mo></mrow>"),
        ("2·(a + 1)", "<mrow><mn>2</mn><mo>·</mo><mrow><mo>(</mo><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow>"
         "<mo>)</mo></mrow></mrow>"),
        ("a +", "<mtext>a +</mtext>"),
        ("<img>", "<mtext>&lt;img&gt;</mtext>"),
    ],
)  # fmt: skip
def test_a_formula_is_typeset(text: str, mathml: str) -> None:
    assert to_mathml(text) == f'<math display="block">{mathml}</math>'


def test_members_of_a_long_maximum_stand_in_rows() -> None:
    members = [f"{i},000·batch·sequence + 1" for i in range(1, 6)]
    tree = ElementTree.fromstring(to_mathml(f"12 + Max({', '.join(members)})"))
    assert len(tree.findall(".//mtr")) == 5
    assert not tree.findall(".//mtext")
