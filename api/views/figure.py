"""A predicted step as a figure for papers and notebooks: bytes by role over the executed ops.

    (1) Stacked steps: `Timeline.by_role`, one area a role, from what stays to what comes and goes; the top is
        `Timeline.curve`. Roles that never reach `SMALL` of the peak are one area, "other".
    (2) Lines: the budget; the baseline's curve, laid over phase by phase (`phases`); borders of phases.
    (3) A mark at the first instant of the peak.
The colours are those of Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/), and for
roles that are rarely large other shades.

Needs matplotlib (the extra ``plot``), no display. Not handled: time (instants are ops, whatever they take).
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from remat.budget import in_units

from .phases import laid_over, runs
from .step_report import SCRATCH, StepReport, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLE_COLOURS: Mapping[str, str] = {
    "parameter": "#0072B2",
    "buffer": "#004C78",
    "optimizer state": "#56B4E9",
    "workspace": "#5F6B73",
    "generator state": "#B7BEC3",
    "input": "#7A4FA3",
    "gradient": "#009E73",
    "activation": "#E69F00",
    "output": "#D55E00",
    "tangent": "#8C3D00",
    "temporary": "#F0E442",
    SCRATCH: "#CC79A7",
}
"""Role -> colour, in the order in which roles are stacked, the lowest first."""
OTHER, OTHER_COLOUR = "other", "#D9D9D9"
"""Small roles together."""
INK, BASELINE_COLOUR, BUDGET_COLOUR = "#222222", "#555555", "#B00020"
SMALL = 0.01
"""Part of the peak below which a role is not shown alone."""
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
_FONT = 7
"""Points; what journals ask for at the least."""


def layers(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """What is stacked, the lowest first: bytes at each instant by role, small roles as `OTHER`."""
    least = SMALL * timeline.peak
    shown: dict[str, tuple[int, ...]] = {}
    small = [0] * len(timeline.ops)
    known = [role for role in ROLE_COLOURS if role in timeline.by_role]
    unknown = [role for role in timeline.by_role if role not in ROLE_COLOURS]
    for role in (*known, *unknown):
        curve = timeline.by_role[role]
        if role in ROLE_COLOURS and any(curve) and max(curve) >= least:
            shown[role] = curve
        else:
            small = [a + b for a, b in zip(small, curve, strict=True)]
    return shown | ({OTHER: tuple(small)} if any(small) else {})


def plot(report: StepReport, axes: "Axes | None" = None) -> "Figure":
    """Draw a report.

    Args:
        report: what to draw.
        axes: where; a figure 7 inches wide is made without. For one column of a paper, give
            ``matplotlib.figure.Figure(figsize=(3.4, 2.8), layout="constrained").subplots()``.

    Returns:
        The figure that the axes are in; its ``savefig`` writes PNG, SVG and PDF.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    axes = axes if axes is not None else _axes()
    timeline = report.timeline
    unit, size = next(each for each in _UNITS if timeline.peak >= each[1] or each[1] == 1)
    _stack(axes, timeline, size)
    _lines(axes, report, size)
    _borders(axes, timeline)
    _peak(axes, timeline, size)
    axes.set_xlim(0, max(len(timeline.ops), 1))
    axes.set_ylim(0, 1.1 * _top(report) / size)
    _frame(axes, unit)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _axes() -> "Axes":
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a figure needs matplotlib: pip install remat[plot]", name=error.name
        ) from error
    return Figure(figsize=(7, 3.1), layout="constrained").subplots()


def _stack(axes: "Axes", timeline: Timeline, size: int) -> None:
    n = len(timeline.ops)
    below = [0] * n
    for role, curve in layers(timeline).items():
        top = [low + held for low, held in zip(below, curve, strict=True)]
        steps = list(zip(below, top, strict=True))
        changes = [i for i in range(n) if not i or steps[i] != steps[i - 1]]  # files stay small
        shown = role != OTHER or max(curve) >= SMALL * timeline.peak
        _steps(
            axes,
            [top[i] / size for i in changes],
            [*changes, n],
            [below[i] / size for i in changes],
            facecolor=ROLE_COLOURS.get(role, OTHER_COLOUR),
            label=role if shown else f"_{role}",  # no legend for a name that begins with _
            linewidth=0,
        )
        below = top


def _steps(
    axes: "Axes",
    values: Sequence[float],
    edges: Sequence[float],
    lower: Sequence[float] | None,
    **style: Any,
) -> None:
    """An area between two step functions, or a line: `Axes.stairs` without its slow search for limits.

    Args:
        axes: where.
        values: upper edge.
        edges: where the steps begin, and where the last ends.
        lower: lower edge; None for a line.
        style: of the patch.
    """
    from matplotlib.patches import StepPatch

    style["baseline"] = (
        lower  # documented, and used, as more than the one number of its annotation
    )
    axes.add_artist(StepPatch(values, edges, fill=lower is not None, **style))


def _lines(axes: "Axes", report: StepReport, size: int) -> None:
    baseline, timeline = report.baseline, report.timeline
    if baseline is not None and baseline.ops and timeline.ops:
        _steps(
            axes,
            [held / size for held in baseline.curve],
            laid_over(baseline, timeline),
            None,
            edgecolor=BASELINE_COLOUR,
            linewidth=0.8,
            label=f"{baseline.program}, {in_units(baseline.peak)}",
        )
    if report.budget_bytes is not None:
        label = f"budget, {in_units(report.budget_bytes)}"
        dashes = (0, (4, 2))
        axes.axhline(report.budget_bytes / size, color=BUDGET_COLOUR, lw=1, ls=dashes, label=label)


def _borders(axes: "Axes", timeline: Timeline) -> None:
    """Borders between phases, and their names above the frame where there is room."""
    n = len(timeline.ops)
    for run in runs(timeline):
        if run.start:
            axes.axvline(run.start, color=INK, lw=0.6, ls=(0, (1, 1.5)))
        if run.stop - run.start >= n / 8:
            middle = (run.start + run.stop) / 2 / n
            axes.text(
                middle,
                1.015,
                run.phase,
                transform=axes.transAxes,
                ha="center",
                va="bottom",
                fontsize=_FONT,
                color=INK,
            )


def _peak(axes: "Axes", timeline: Timeline, size: int) -> None:
    if not timeline.ops:
        return
    axes.plot(
        [timeline.peak_instant + 0.5],
        [timeline.peak / size],
        marker="v",
        ms=4.5,
        color=INK,
        mec="white",
        mew=0.5,
        ls="",
        label=f"peak, {in_units(timeline.peak)}",
    )


def _top(report: StepReport) -> int:
    """The largest value that is drawn, bytes."""
    baseline = report.baseline.peak if report.baseline else 0
    return max(report.timeline.peak, report.budget_bytes or 0, baseline, 1)


def _frame(axes: "Axes", unit: str) -> None:
    axes.set_xlabel("executed op", fontsize=_FONT + 1)
    axes.set_ylabel(f"predicted memory ({unit})", fontsize=_FONT + 1)
    axes.tick_params(labelsize=_FONT, width=0.6, length=2.5)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Below the axis' label, in as many columns as there is room for."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    width = figure.get_figwidth() * axes.get_position().width
    entries = len(axes.get_legend_handles_labels()[1])
    if not entries:
        return
    rows = ceil(entries / max(2, int(width / 0.85)))
    down = ScaledTranslation(0, -2.5 * (_FONT + 3) / 72, figure.dpi_scale_trans)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=axes.transAxes + down,
        ncols=ceil(entries / rows),
        fontsize=_FONT,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.0,
        labelspacing=0.3,
    )
