import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser as headless
import pytest
from hypothesis import HealthCheck, given, settings
from pages import complete, deep, listed, number
from viewed import op, report_of, small_reports, tensor, timelines

from remat.passes.composition import fold
from remat.views.html import to_html
from remat.views.step_report import (
    NOT_NEEDED,
    RECOMPUTED,
    SAVED,
    ExecutedOp,
    FormulaText,
    HeldTensor,
    PlanFigures,
    Point,
    StepReport,
    Timeline,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=\"alert('run')\"><!--<script>&amp;'\"]]>`${alert(1)}"
FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if reason := headless.why_not():
        pytest.skip(reason)
    with headless.chromium() as found:
        yield found


@pytest.fixture
def show(browser: "Browser", tmp_path: Path) -> Iterator[Any]:
    """Opens a report; after the test nothing may have gone wrong on its page."""
    views: list[tuple[Any, headless.Opened]] = []

    def open_page(report: StepReport, **options: Any) -> "Page":
        path = tmp_path / f"{len(views)}.html"
        path.write_text(to_html(report), encoding="utf-8")
        manager = headless.opened(browser, path, **options)
        views.append((manager, manager.__enter__()))
        return views[-1][1].page

    yield open_page
    problems = [problem for _, view in views for problem in view.problems]
    for manager, _ in views:
        manager.__exit__(None, None, None)
    assert problems == []


def assert_lists_what_is_alive(page: "Page", timeline: Timeline, instant: int) -> None:
    assert page.locator("#alive").get_attribute("data-instant") == str(instant)
    expected = [[t.name, str(t.bytes)] for t in timeline.alive(instant)]
    assert [row[:2] for row in listed(page, "#alive")] == expected
    for role, curve in timeline.by_role.items():
        if any(curve):
            total = page.locator(f'#roles data[data-role="{role}"]')
            assert total.get_attribute("value") == str(curve[instant]), role


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["planned", "eager"])
def test_a_page_opens_without_errors_and_without_a_network(
    show: Any, kind: str, theme: str
) -> None:
    report = complete() if kind == "planned" else small_reports()["eager"]
    page = show(report, theme=theme)
    assert page.locator("body").get_attribute("data-ready") == "true"
    assert page.locator("html").get_attribute("data-theme") == theme
    assert page.locator("#failed").is_hidden()


def test_the_figures_are_those_of_the_report(show: Any) -> None:
    report = complete()
    page, plan = show(report), report.plan
    assert plan is not None
    assert report.baseline is not None
    shown = {
        figure.get_attribute("data-figure"): number(figure)
        for figure in page.locator("[data-figure]").all()
    }
    assert shown == {
        "peak": report.timeline.peak,
        "budget": report.budget_bytes,
        "eager": report.baseline.peak,
        "overhead": plan.overhead,
        "resident": report.timeline.resident,
        "least-peak": plan.least_peak_bytes,
    }
    ledger = [int(number(row)) for row in page.locator("[data-ledger]").all()]
    assert ledger == list(plan.ledger.values())
    text = page.locator("#details").inner_text()
    for fact in (plan.status, plan.bound_class, *report.versions.values(), *report.notes):
        assert fact in text
    assert f"{plan.lower_bound * 100:.3f} %" in text
    assert page.locator("math").count() == len(report.formulas)


@pytest.mark.parametrize("kind", ["planned", "eager"])
def test_the_peak_marker_lists_what_is_alive_at_the_peak(show: Any, kind: str) -> None:
    report = small_reports()[kind]
    page = show(report)
    page.locator("#memory-chart").press("Home")
    headless.settle(page)
    assert_lists_what_is_alive(page, report.timeline, 0)
    page.locator("#peak-marker").click()
    headless.settle(page)
    assert_lists_what_is_alive(page, report.timeline, report.timeline.peak_instant)


def test_keys_move_the_instant(show: Any) -> None:
    report = small_reports()["planned"]
    timeline = report.timeline
    page = show(report)
    chart = page.get_by_role("slider", name="Instant of the step")
    at, last = timeline.peak_instant, len(timeline.ops) - 1
    for key, expected in (
        ("ArrowLeft", at - 1), ("ArrowRight", at), ("ArrowRight", at + 1), ("Home", 0),
        ("ArrowLeft", 0), ("End", last), ("ArrowRight", last), ("p", at), ("+", at), ("0", at),
    ):  # fmt: skip
        chart.press(key)
        headless.settle(page)
        assert chart.get_attribute("aria-valuenow") == str(expected), key
    assert timeline.ops[at].name in (chart.get_attribute("aria-valuetext") or "")
    executes = page.locator("#executes").inner_text()
    assert timeline.ops[at].target in executes
    assert timeline.ops[at].phase in executes


@given(timelines())
@FEW
def test_any_step_is_shown(show: Any, timeline: Timeline) -> None:
    page = show(report_of(timeline, baseline=timeline, budget_bytes=1000))
    assert page.locator("body").get_attribute("data-ready") == "true"
    assert int(number(page.locator('[data-figure="peak"]'))) == timeline.peak
    if not timeline.ops:
        assert page.locator("#memory").is_hidden()
        return
    assert_lists_what_is_alive(page, timeline, timeline.peak_instant)
    page.locator("#memory-chart").press("Home")
    for instant in range(len(timeline.ops)):
        headless.settle(page)
        assert_lists_what_is_alive(page, timeline, instant)
        page.locator("#memory-chart").press("ArrowRight")


def test_areas_are_as_high_as_the_bytes(show: Any) -> None:
    held = (
        tensor("w", 100, -1, 4, "parameter"),
        tensor("a", 300, 1, 2),
        tensor("g", 200, 2, 3, "gradient"),
    )
    timeline = Timeline("eager", tuple(op(f"op_{i}") for i in range(4)), held)
    page = show(report_of(timeline))
    columns = page.evaluate(
        """() => {
          const canvas = document.querySelector("#memory-chart canvas");
          const paint = canvas.getContext("2d", { willReadFrequently: true });
          const style = getComputedStyle(document.documentElement);
          const names = new Map();
          for (const name of ["parameter", "gradient", "activation"]) {
            const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
            names.set([0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(), name);
          }
          return [0, 1, 2, 3].map((i) => {
            const x = Math.round(54 + ((canvas.width - 64) * (i + 0.5)) / 4);
            const pixels = paint.getImageData(x, 0, 1, canvas.height).data;
            const counts = {};
            for (let y = 0; y < canvas.height; y++) {
              const name = names.get([...pixels.slice(4 * y, 4 * y + 3)].join());
              if (name) counts[name] = (counts[name] ?? 0) + 1;
            }
            return counts;
          });
        }"""
    )
    marker, chart = page.locator("#peak-marker"), page.locator("#memory-chart").bounding_box()
    top = float(marker.evaluate("each => parseFloat(each.style.top)"))
    pixel = (chart["height"] - 26 - top) / timeline.peak
    for instant, column in enumerate(columns):
        for role in ("parameter", "gradient", "activation"):
            expected = timeline.by_role[role][instant] * pixel
            assert abs(column.get(role, 0) - expected) <= 2, (instant, role)  # pixels, of borders


def test_time_is_offered_where_it_is_known(show: Any) -> None:
    assert show(small_reports()["eager"]).locator("#axis-choice").is_hidden()
    report = small_reports()["planned"]
    page = show(report)
    page.get_by_role("button", name="Predicted time").click()
    page.locator("#peak-marker").click()
    headless.settle(page)
    assert_lists_what_is_alive(page, report.timeline, report.timeline.peak_instant)


def test_a_click_on_the_curve_chooses_the_instant_that_is_drawn_there(show: Any) -> None:
    timeline = small_reports()["planned"].timeline
    page = show(small_reports()["planned"])
    chart = page.locator("#memory-chart")
    box = chart.bounding_box()
    for share in (0.1, 0.5, 0.9):
        x = 54 + (box["width"] - 64) * share
        chart.click(position={"x": x, "y": box["height"] / 2})
        headless.settle(page)
        chosen = int(chart.get_attribute("aria-valuenow") or "")
        pixels = (box["width"] - 64) / len(timeline.ops)
        assert abs((chosen + 0.5) * pixels - (x - 54)) <= pixels / 2 + 1
        assert_lists_what_is_alive(page, timeline, chosen)


def test_where_a_pixel_holds_several_ops_the_fullest_is_chosen(show: Any) -> None:
    timeline = deep().timeline
    page = show(deep())
    chart = page.locator("#memory-chart")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        headless.settle(page)
        box = chart.bounding_box()
        share = (timeline.peak_instant + 0.5) / len(timeline.ops)
        chart.press("Home")
        chart.click(position={"x": 54 + (box["width"] - 64) * share, "y": box["height"] - 40})
        headless.settle(page)
        assert chart.get_attribute("aria-valuenow") == str(timeline.peak_instant)


def range_groups(timeline: Timeline) -> dict[str, list[HeldTensor]]:
    groups: dict[str, list[HeldTensor]] = {}
    for held in timeline.tensors:
        if held.bytes:
            groups.setdefault(fold(held.module) or f"({held.role})", []).append(held)
    return groups


def test_live_ranges_fold_by_layer_and_open(show: Any) -> None:
    timeline = small_reports()["planned"].timeline
    groups = range_groups(timeline)
    page = show(small_reports()["planned"])
    most = {
        key: max(
            sum(t.bytes for t in held if t.birth <= i <= t.death) for i in range(len(timeline.ops))
        )
        for key, held in groups.items()
    }
    assert {row[0]: int(row[1]) for row in listed(page, "#ranges-grid")} == most
    assert any("*" in key for key in groups)
    grid = page.locator("#ranges-grid")
    first = grid.locator(".row").first
    key = first.locator("bdi").inner_text()
    grid.focus()
    grid.press("ArrowDown")
    grid.press("ArrowRight")
    names = {re.sub(r"_again(_\d+)?(?=\.\d+$|$)", "", held.name) for held in groups[key]}
    rows = listed(page, "#ranges-grid")
    assert {row[0] for row in rows[1 : 1 + len(names)]} == names
    grid.press("Home")
    grid.press("ArrowLeft")
    assert len(listed(page, "#ranges-grid")) == len(groups)


def test_live_ranges_are_sorted(show: Any) -> None:
    timeline = small_reports()["planned"].timeline
    groups, page = range_groups(timeline), show(small_reports()["planned"])
    n = len(timeline.ops)

    def area(held: HeldTensor) -> int:
        return held.bytes * (min(held.death, n - 1) + 1 - max(held.birth, 0))

    def shown() -> list[list[HeldTensor]]:
        return [groups[row[0]] for row in listed(page, "#ranges-grid")]

    areas = [sum(map(area, held)) for held in shown()]
    assert areas == sorted(areas, reverse=True)
    page.get_by_role("button", name="Birth").click()
    births = [min(t.birth for t in held) for held in shown()]
    assert births == sorted(births)
    page.locator("#ranges-sort").get_by_role("button", name="Bytes", exact=True).click()
    most = [int(row[1]) for row in listed(page, "#ranges-grid")]
    assert most == sorted(most, reverse=True)


def test_what_is_computed_again_is_in_the_row_of_the_value(show: Any) -> None:
    ops = [replace(op(f"op_{i}"), repeated=i == 3) for i in range(5)]
    held = (
        replace(tensor("x", 8, 0, 1), module="a.0"),
        replace(tensor("x_again", 8, 3, 4), module="a.0"),
        replace(tensor("y", 9, 2, 4), module="b.0"),
    )
    page = show(report_of(Timeline("planned", tuple(ops), held)))
    page.get_by_role("button", name="Birth").click()
    grid = page.locator("#ranges-grid")
    grid.focus()
    grid.press("Home")
    grid.press("ArrowRight")
    assert [row[0] for row in listed(page, "#ranges-grid")] == ["a.*", "x", "b.*"]
    grid.press("ArrowDown")
    text = page.locator("#ranges-detail").inner_text()
    assert "from op 0 to op 1" in text
    assert "from op 3 to op 4" in text


def test_the_table_filters_folds_and_opens(show: Any) -> None:
    timeline = small_reports()["planned"].timeline
    page = show(small_reports()["planned"])
    decided = [t for t in timeline.tensors if t.decision]
    rows = listed(page, "#tensor-grid")
    assert sum(int(row[1]) for row in rows) == sum(t.bytes for t in decided)
    assert len(rows) < len(decided)
    assert (
        page.locator("#tensor-count")
        .inner_text()
        .startswith(f"{len(decided)} of {len(timeline.tensors)}")
    )

    page.get_by_label("Filter the tensors").fill("GELU saved")
    headless.settle(page)
    gelu = [
        t for t in decided if "gelu" in f"{t.op} {t.name} {t.reason}" and "saved" == t.decision
    ]
    assert gelu
    assert sum(int(row[1]) for row in listed(page, "#tensor-grid")) == sum(t.bytes for t in gelu)
    page.get_by_label("Filter the tensors").fill("no such tensor")
    headless.settle(page)
    assert listed(page, "#tensor-grid") == []
    page.get_by_label("Filter the tensors").fill("")
    page.get_by_role("button", name="not needed").click()
    headless.settle(page)
    kept = [t for t in decided if t.decision != NOT_NEEDED]
    assert sum(int(row[1]) for row in listed(page, "#tensor-grid")) == sum(t.bytes for t in kept)

    folded = page.locator('#tensor-grid .row[aria-expanded="false"]').first
    total, before = int(number(folded)), len(listed(page, "#tensor-grid"))
    page.locator("#tensor-grid").evaluate("grid => grid.scrollTop = 0")
    headless.settle(page)
    folded.click()
    members = page.locator('#tensor-grid .row[aria-level="2"]')
    assert sum(int(number(member)) for member in members.all()) == total
    page.locator('#tensor-grid .row[aria-expanded="true"]').first.click()
    assert len(listed(page, "#tensor-grid")) == before


def test_the_frontier_is_shown_if_there_is_one(show: Any) -> None:
    assert show(small_reports()["planned"]).locator("#frontier").count() == 0
    report = complete()
    page = show(report)
    assert page.locator("#frontier-chart circle.point").count() == len(report.frontier)
    assert page.locator("#frontier-chart circle.chosen").count() == 1
    cells = [
        float(each.get_attribute("value") or "")
        for each in page.locator("#frontier td data").all()
    ]
    points = ((p.budget_bytes, p.peak_bytes, p.overhead, p.lower_bound) for p in report.frontier)
    assert cells == [number for point in points for number in point]


def test_the_theme_can_be_switched(show: Any) -> None:
    page = show(complete(), theme="light")

    def colours() -> list[str]:
        return page.evaluate(  # type: ignore[no-any-return]
            """() => [getComputedStyle(document.body).backgroundColor,
                      document.querySelector("#memory-chart canvas").toDataURL(),
                      document.querySelector("#ranges-grid canvas").toDataURL()]"""
        )

    light = colours()
    page.get_by_role("button", name="Dark").click()
    headless.settle(page)
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert all(a != b for a, b in zip(light, colours(), strict=True))
    page.get_by_role("button", name="Dark").click()
    headless.settle(page)
    assert colours() == light


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_a_page_is_never_wider_than_the_window(show: Any, width: int) -> None:
    report = replace(complete(), model="A" * 90)
    page = show(report, size=(width, 844))
    page.get_by_text("As a table").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_all_controls_have_names_and_can_be_reached_by_keys(show: Any) -> None:
    page = show(complete())
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a, button, input, summary, [tabindex='0']")]
          .filter((each) => each.checkVisibility()).length"""
    )
    seen = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                """() => { const at = document.activeElement;
                  const name = at.getAttribute("aria-label") ?? at.textContent;
                  const label = document.getElementById(at.getAttribute("aria-labelledby"));
                  return [at.outerHTML.slice(0, 80), (label?.textContent ?? name).trim(),
                          getComputedStyle(at).outlineStyle]; }"""
            )
        )
    assert len({html for html, _, _ in seen}) == wanted
    assert all(name for _, name, _ in seen)
    assert {outline for _, _, outline in seen} == {"solid"}


def test_names_are_never_markup(show: Any) -> None:
    bad = HOSTILE
    one = ExecutedOp(bad, bad, bad, False, 5, 1, bad, bad)
    held = (
        HeldTensor(bad, bad, 40, -1, 2, bad, bad, bad, bad, SAVED, bad, 7),
        HeldTensor(bad, bad, 30, 0, 1, bad, bad, bad, bad, RECOMPUTED, bad, 7),
    )
    timeline = Timeline("planned", (one, one), held)
    report = replace(
        report_of(timeline, baseline=timeline, budget_bytes=100, notes=(bad,), sizes={bad: 3}),
        model=bad,
        device=bad,
        optimizer=bad,
        loss=bad,
        versions={bad: bad},
        formulas=(FormulaText(bad, bad, bad),),
        plan=PlanFigures(0.1, 0.1, 0.0, bad, bad, 1, 2, 1, {bad: 3}, {bad: 1.0}),
        frontier=(Point(1, 2, 0.3, 0.1),),
    )
    assert "<img" not in to_html(report)
    page = show(report)
    assert page.locator("body").get_attribute("data-ready") == "true"
    assert page.locator("h1").inner_text() == bad
    assert page.title() == bad
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert [row[0] for row in listed(page, "#alive")] == [bad, bad]
    page.locator("#tensor-grid .row").first.click()
    page.locator("#ranges-grid .row .label").first.click()
    headless.settle(page)
    assert bad in page.locator("#tensor-detail").inner_text()


def test_a_browser_without_decompression_says_so(show: Any) -> None:
    page = show(complete(), before="delete window.DecompressionStream")
    assert "no DecompressionStream" in page.get_by_role("alert").inner_text()
    assert page.locator("#memory").is_hidden()
    assert int(number(page.locator('[data-figure="peak"]'))) == complete().timeline.peak


def test_of_ten_thousand_tensors_only_what_is_visible_exists(show: Any) -> None:
    report = deep()
    page = show(report)
    held = report.timeline.alive(report.timeline.peak_instant)
    grid = page.locator("#alive")
    assert grid.get_attribute("aria-rowcount") == str(len(held) + 1)
    for key, expected in (("Home", held[:5]), ("End", held[-5:])):
        grid.press(key)
        headless.settle(page)
        rows = page.locator("#alive .row")
        shown = sorted(
            (int(row.get_attribute("aria-rowindex") or ""), row.locator("b").inner_text())
            for row in rows.all()
        )
        names = [name for _, name in shown]
        assert (names[:5] if key == "Home" else names[-5:]) == [t.name for t in expected]
    for _ in range(30):
        grid.press("PageUp")
    headless.settle(page)
    assert page.locator(".row").count() < 200
