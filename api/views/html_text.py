"""The words and figures of the HTML report: what it shows without a script.

Every value is escaped here; a byte count stands in ``<data value="...">`` with its exact number.
"""

from collections.abc import Iterable, Mapping
from html import escape

from remat.budget import in_units

from .mathml import to_mathml
from .step_report import PlanFigures, StepReport


def lead(report: StepReport) -> str:
    """What the report says, in a sentence."""
    step, plan = report.timeline, report.plan
    text = f"The step is predicted to peak at {_bytes(step.peak)}"
    if report.baseline and report.baseline.peak:
        less = 1 - step.peak / report.baseline.peak
        text += f" instead of {_bytes(report.baseline.peak)}, {_percent(less)} less"
    if plan:
        text += f", for {_percent(plan.overhead)} more time in forward and backward"
    return text + "."


def facts(report: StepReport) -> str:
    """Device, optimizer, loss and sizes, as list items."""
    known = {"device": report.device, "optimizer": report.optimizer, "loss": report.loss}
    known |= {name: f"{size:,}" for name, size in report.sizes.items()}
    return "".join(
        f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in known.items() if value
    )


def figures(report: StepReport) -> str:
    """The main numbers, as groups of a `<dl>`."""
    step, plan, baseline = report.timeline, report.plan, report.baseline
    shown = [_figure("peak", "Peak", _bytes(step.peak), _peak_place(report))]
    if report.budget_bytes is not None:
        left = report.budget_bytes - step.peak
        note = f"{in_units(left)} left" if left >= 0 else f"{in_units(-left)} too little"
        shown.append(_figure("budget", "Budget", _bytes(report.budget_bytes), note))
    if baseline:
        shown.append(_figure("eager", "Eager peak", _bytes(baseline.peak), "before planning"))
    if plan:
        shown.append(_figure("overhead", "Extra time", _share(plan.overhead), _proof(plan)))
    shown.append(_figure("resident", "Resident", _bytes(step.resident), "before the step"))
    if plan:
        note = f"proven: none below {in_units(plan.least_peak_bound_bytes)}"
        shown.append(_figure("least-peak", "Least peak", _bytes(plan.least_peak_bytes), note))
    return "".join(shown)


def frontier_table(report: StepReport) -> str:
    """The section of budget against overhead; its numbers are in a table beside the picture."""
    rows = "".join(
        f"<tr><td>{_bytes(p.budget_bytes)}</td><td>{_bytes(p.peak_bytes)}</td>"
        f"<td>{_share(p.overhead)}</td><td>{_share(p.lower_bound)}</td></tr>"
        for p in report.frontier
    )
    return (
        '<section id="frontier" aria-labelledby="frontier-title" data-view>'
        '<div class="bar"><h2 id="frontier-title">Budget against extra time</h2></div>'
        '<p class="hint">Extra time of forward and backward, predicted. The dashed line is proven: '
        "no plan of its class is below it.</p>"
        '<div id="frontier-chart" role="img" aria-label="Extra time of plans against their budget; '
        'the table after it has the numbers"></div>'
        "<details><summary>As a table</summary><table><thead><tr><th scope=col>budget</th>"
        "<th scope=col>peak</th><th scope=col>extra time</th><th scope=col>proven bound</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def details(report: StepReport) -> str:
    """Plan, formulas, versions and notes."""
    parts = []
    if report.plan:
        parts.append(_plan(report.plan))
        if report.plan.ledger:
            parts.append(_ledger(report.plan.ledger))
    parts.append(_block("Versions", _pairs(report.versions.items())))
    if report.plan and report.plan.seconds:
        seconds = {part: f"{each:.2f} s" for part, each in report.plan.seconds.items()}
        parts.append(_block("Time that planning took", _pairs(seconds.items())))
    if report.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts.append(_block("What the figures rest on", f'<ul id="notes">{notes}</ul>'))
    if report.formulas:
        rows = "".join(
            f"<dt>{escape(formula.name)}</dt>"
            f'<dd tabindex="0" aria-label="{escape(formula.text)}">{to_mathml(formula.text)}</dd>'
            for formula in report.formulas
        )
        parts.append(_block("Formulas, in bytes", f'<dl class="formulas">{rows}</dl>', wide=True))
    return "".join(parts)


def _bytes(value: int) -> str:
    return f'<data value="{value}" title="{value:,} bytes">{in_units(value)}</data>'


def _share(value: float) -> str:
    return f'<data value="{value!r}">{_percent(value)}</data>'


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %" if abs(value) >= 0.0095 or not value else f"{value * 100:.2g} %"


def _figure(key: str, label: str, value: str, note: str) -> str:
    return (
        f'<div data-figure="{key}"><dt>{escape(label)}</dt>'
        f"<dd>{value}<small>{escape(note)}</small></dd></div>"
    )


def _peak_place(report: StepReport) -> str:
    at = report.timeline.peak_instant
    return f"predicted, in {report.timeline.ops[at].phase}" if at >= 0 else "predicted"


def _proof(plan: PlanFigures) -> str:
    if plan.status == "optimal":
        return f"optimal: proven within {plan.gap * 100:.2g} points"
    return f"predicted; proven: none below {_percent(plan.lower_bound)}"


def _plan(plan: PlanFigures) -> str:
    return _block(
        "Plan",
        _pairs(
            {
                "solver": plan.status,
                "extra time, predicted": f"{plan.overhead * 100:.3f} %",
                "proven lower bound": f"{plan.lower_bound * 100:.3f} %",
                "gap": f"{plan.gap * 100:.3f} points",
                "the bound is about": plan.bound_class,
                "forward and backward without it": f"{plan.step_time_ns / 1e6:,.2f} ms",
            }.items()
        ),
    )


def _ledger(ledger: Mapping[str, int]) -> str:
    """Peaks with a bar each, the largest as wide as the list."""
    most = max(max(ledger.values()), 1)
    rows = "".join(
        f"<div data-ledger><dt>{escape(name)}</dt><dd>{_bytes(value)}</dd>"
        '<svg aria-hidden="true"><rect class="all" width="100%" height="5" rx="2.5"/>'
        f'<rect width="{100 * value / most:.2f}%" height="5" rx="2.5"/></svg></div>'
        for name, value in ledger.items()
    )
    return _block("Peak, with one more means each", f'<dl id="ledger">{rows}</dl>')


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in pairs)
    return f"<dl>{''.join(rows)}</dl>"


def _block(title: str, content: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<div{kind}><h3>{escape(title)}</h3>{content}</div>"
