"""What is drawn is the timeline."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from viewed import ROLES, op, report_of, small_reports, tensor, timelines

from remat.ir import Role
from remat.views.figure import OTHER, ROLE_COLOURS, layers, plot
from remat.views.phases import laid_over, runs
from remat.views.step_report import SCRATCH, StepReport, Timeline


@pytest.fixture(scope="module", params=["planned", "eager"])
def report(request: pytest.FixtureRequest) -> StepReport:
    return small_reports()[request.param]


def axes_of(report: StepReport) -> Axes:
    (axes,) = plot(report).axes
    return axes


def areas(axes: Axes, instants: int) -> dict[str, list[tuple[float, float]]]:
    """Label -> lower and upper edge at each instant."""
    found: dict[str, list[tuple[float, float]]] = {}
    for patch in axes.patches:
        assert isinstance(patch, StepPatch)
        tops, edges, bottoms = patch.get_data()
        if not patch.get_fill():
            continue
        assert (edges[0], edges[-1]) == (0, instants)
        drawn: list[tuple[float, float]] = []
        for i, top in enumerate(tops):
            length = int(edges[i + 1] - edges[i])
            drawn += [(float(bottoms[i]), float(top))] * length  # type: ignore[index]
        found[str(patch.get_label()).lstrip("_")] = drawn
    return found


@settings(deadline=None, max_examples=25)
@given(timelines())
def test_the_areas_are_the_curves_and_stack_to_the_total(timeline: Timeline) -> None:
    (axes,) = plot(report_of(timeline)).axes
    drawn = areas(axes, len(timeline.ops))
    size = 1000 if timeline.peak >= 1000 else 1
    below = [0] * len(timeline.ops)
    for name, curve in layers(timeline).items():
        above = [low + held for low, held in zip(below, curve, strict=True)]
        assert drawn.pop(name) == [
            (low / size, top / size) for low, top in zip(below, above, strict=True)
        ]
        below = above
    assert not drawn
    assert below == list(timeline.curve)


@given(timelines())
def test_layers_are_the_roles_and_the_small_ones_together(timeline: Timeline) -> None:
    found = layers(timeline)
    other = [0] * len(timeline.ops)
    for role, curve in timeline.by_role.items():
        if role in found:
            assert found[role] == curve
        else:
            other = [a + b for a, b in zip(other, curve, strict=True)]
    assert list(found.get(OTHER, [0] * len(timeline.ops))) == other
    assert ROLES[-1] not in found


def test_a_real_step_is_drawn_in_megabytes(report: StepReport) -> None:
    axes = axes_of(report)
    drawn = areas(axes, len(report.timeline.ops))
    unit, size = ("MB", 10**6) if report.timeline.peak >= 10**6 else ("kB", 10**3)
    assert axes.get_ylabel() == f"predicted memory ({unit})"
    tops = [max(top for _, top in each) for each in zip(*drawn.values(), strict=True)]
    assert tops == [held / size for held in report.timeline.curve]


def test_budget_baseline_borders_and_peak_are_where_the_report_says() -> None:
    report = small_reports()["planned"]
    timeline, baseline = report.timeline, report.baseline
    assert baseline is not None
    assert report.budget_bytes is not None
    axes = axes_of(report)
    size = 10**6 if timeline.peak >= 10**6 else 10**3
    lines = {str(line.get_label()): line for line in axes.lines}
    (budget,) = [line for label, line in lines.items() if label.startswith("budget")]
    assert np.asarray(budget.get_ydata()).tolist() == [report.budget_bytes / size] * 2
    (peak,) = [line for label, line in lines.items() if label.startswith("peak")]
    assert np.asarray(peak.get_xdata()).tolist() == [timeline.peak_instant + 0.5]
    assert np.asarray(peak.get_ydata()).tolist() == [timeline.peak / size]
    others = [line for line in axes.lines if line not in (budget, peak)]
    borders = [np.asarray(line.get_xdata()).tolist()[0] for line in others]
    assert borders == [run.start for run in runs(timeline)[1:]]
    (outline,) = [p for p in axes.patches if str(p.get_label()).startswith("eager")]
    assert isinstance(outline, StepPatch)
    tops, edges, _ = outline.get_data()
    assert list(tops) == [held / size for held in baseline.curve]
    assert tuple(edges) == laid_over(baseline, timeline)
    assert axes.get_ylim()[1] > baseline.peak / size


def test_the_unit_follows_the_peak() -> None:
    for size, unit in ((3, "B"), (3000, "kB"), (3 * 10**6, "MB"), (3 * 10**9, "GB")):
        timeline = Timeline("eager", (op("a"),), (tensor("t", size, 0, 0),))
        assert axes_of(report_of(timeline)).get_ylabel() == f"predicted memory ({unit})"


def test_every_role_has_its_colour() -> None:
    assert {*ROLE_COLOURS} == {*(role.value for role in Role), SCRATCH}
    assert len({*ROLE_COLOURS.values()}) == len(ROLE_COLOURS)


@pytest.mark.parametrize("width", [3.4, 7])
def test_everything_is_inside_the_figure(width: float, report: StepReport) -> None:
    """In one column of a paper and over two: nothing is cut off, and texts do not meet."""
    axes = Figure(figsize=(width, 2.8), layout="constrained").subplots()
    figure = plot(report, axes)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    whole = figure.bbox
    legend = axes.get_legend()
    assert legend is not None
    boxes = [text.get_window_extent(renderer) for text in (axes.xaxis.label, *axes.texts)]
    boxes.append(legend.get_window_extent(renderer))
    for number, box in enumerate(boxes):
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert not any(box.overlaps(other) for other in boxes[:number])


@pytest.mark.parametrize(
    ("suffix", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_it_is_saved_in_the_usual_formats(suffix: str, head: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"f.{suffix}"
    plot(small_reports()["planned"]).savefig(path)
    assert path.read_bytes().startswith(head)


def test_the_axes_may_be_the_caller_s() -> None:
    left, right = Figure(figsize=(7, 3)).subplots(1, 2)
    figure = plot(small_reports()["planned"], right)
    assert figure is right.get_figure(root=True)
    assert right.patches
    assert not left.patches


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install remat\[plot\]"):
        plot(report_of(Timeline("eager", (), ())))
