"""Step reports say what the plan and its trace say; text and differences add up."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from training import HUGE, planned

from remat import StepProtocol, StepReport, analyze
from remat.passes import profile
from remat.views.diff import diff
from remat.views.groups import alike
from remat.views.html import to_html
from remat.views.step_report import NOT_NEEDED, RECOMPUTED, SAVED
from remat.views.text import to_text

DROPPED = StepProtocol(outputs_held=False)


def half_way(name: str, make: Any, protocol: StepProtocol) -> Any:
    """A drop-in half way from the least peak to eager's."""
    plan = planned(zoo.build(name), make, protocol).plan
    budget = (plan.least_peak_bytes + plan.baseline_peak_bytes) // 2
    return planned(zoo.build(name), make, protocol, budget, gap=1.0).model


CASES: dict[str, Callable[[], Any]] = {
    "loss inside": lambda: half_way("gpt2", torch.optim.AdamW, DROPPED),
    "loss outside": lambda: half_way("mlp", torch.optim.AdamW, DROPPED),
    "gradients resident": lambda: half_way("mlp", None, StepProtocol(gradients_resident=True)),
    "eager": lambda: planned(zoo.build("mlp"), torch.optim.AdamW, DROPPED, HUGE, 1.0).model,
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> tuple[Any, StepReport, Any]:
    """A drop-in's `remat`, its report, and the drop-in, which lives as long."""
    model = CASES[request.param]()
    remat = vars(model)["remat"]
    return remat, remat.report(), model


Made = tuple[Any, StepReport, Any]


def test_figures_are_the_plans(made: Made) -> None:
    remat, report, _ = made
    plan, found = remat.plan, profile(remat.planned.trace)
    assert report.timeline.curve == found.bytes
    assert report.timeline.peak == plan.peak_bytes <= plan.budget_bytes == report.budget_bytes
    assert report.timeline.peak_instant == found.peak_instant
    assert report.timeline.resident == found.resident
    assert (report.baseline is None) is plan.is_eager
    eager = report.baseline or report.timeline
    assert (eager.program, eager.peak) == ("eager", plan.baseline_peak_bytes)
    assert report.plan is not None
    assert (report.plan.overhead, report.plan.gap) == (plan.overhead, plan.gap)


def test_times_add_up_to_the_plans(made: Made) -> None:
    remat, report, _ = made
    plan, ops = remat.plan, report.timeline.ops
    if plan.is_eager:
        assert not any(op.time_ns for op in ops)
        return
    assert sum(op.time_ns for op in ops if not op.repeated) == plan.step_time_ns
    again = sum(op.time_ns for op in ops if op.repeated)
    assert again == pytest.approx(plan.overhead * plan.step_time_ns, abs=1)
    assert not any(op.time_ns for op in ops if op.phase == "optimizer step")


def test_decisions_are_the_plans(made: Made) -> None:
    remat, report, _ = made
    plan, timeline = remat.plan, report.timeline
    if plan.is_eager:
        return
    border = next(i for i, op in enumerate(timeline.ops) if op.phase != "forward")
    first = [t for t in timeline.tensors if t.birth < border and t.decision == SAVED]
    assert sum(t.bytes for t in first) == sum(t.bytes for t in plan.saved)
    assert len(first) == len(plan.saved)
    made_again = [t for t in timeline.tensors if t.birth >= 0 and timeline.ops[t.birth].repeated]
    assert sorted(t.name for t in made_again) == sorted(t.name for t in plan.recomputed)
    assert all(t.decision == RECOMPUTED for t in made_again)
    assert all(t.reason for t in timeline.tensors if t.decision)
    named = {op.name.partition("_again")[0] for op in timeline.ops if op.repeated}
    executed = {op.name: i for i, op in enumerate(timeline.ops)}
    for name in named:  # what is made again was decided to be, or is kept for a while
        makes = [t for t in timeline.tensors if t.birth == executed[name] and t.bytes]
        again = "made again" in " ".join(t.reason for t in makes)
        assert again or timeline.ops[executed[name]].phase != "forward" or not makes
    for tensor in timeline.tensors:
        if tensor.decision == SAVED:
            assert tensor.death >= border
    freed = [t for t in timeline.tensors if t.decision == NOT_NEEDED and t.role != "output"]
    assert all(t.death <= border or t.role == "input" for t in freed)


def test_names_are_the_users(made: Made) -> None:
    remat, report, _ = made
    parameters = {name: p.nbytes for name, p in remat.owner().named_parameters()}
    held = {t.name: t.bytes for t in report.timeline.tensors if t.role == "parameter"}
    assert held == parameters
    tensors = report.timeline.tensors
    written_over = {tensor.over for tensor in tensors}
    last = [t for number, t in enumerate(tensors) if number not in written_over]
    gradients = {t.name for t in last if t.role == "gradient"}
    assert gradients <= {f"{name}.grad" for name in parameters}
    assert len(gradients) > len(parameters) // 2


def test_results_that_share_a_storage_follow_each_other(made: Made) -> None:
    remat, report, _ = made
    tensors = report.timeline.tensors
    later = [t for t in tensors if t.over >= 0]
    for tensor in later:
        before = tensors[tensor.over]
        assert before.death + 1 == tensor.birth
        assert before.bytes == tensor.bytes
        assert before.role == tensor.role
    over = {report.timeline.ops[t.birth].name for t in later}
    assert over == set(remat.plan.reused)


def test_json_gives_it_back(made: Made) -> None:
    report = made[1]
    assert StepReport.from_json(report.to_json()) == report


def test_a_notebook_shows_the_page(made: Made) -> None:
    report = made[1]
    frame = report._repr_html_()
    assert frame.startswith("<iframe ")
    shown = unescape(frame.partition('srcdoc="')[2].partition('"')[0])
    assert shown == to_html(report)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "remat.memory_report/1"}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no step report|schema"):
        StepReport.from_json(text)


@settings(max_examples=25, deadline=None)
@given(width=st.integers(40, 200))
def test_text_fits_a_screen_of_any_width(made: Made, width: int) -> None:
    lines = to_text(made[1], width).splitlines()
    assert len(lines) <= 48
    assert all(len(line) <= width for line in lines)


def test_what_is_alive_adds_up_at_every_instant(made: Made) -> None:
    timeline = made[1].timeline
    for instant, (op, held) in enumerate(zip(timeline.ops, timeline.curve, strict=True)):
        alive = timeline.alive(instant)
        assert sum(tensor.bytes for tensor in alive) + op.scratch == held
        assert sum(row.bytes for row in alike(alive)) + op.scratch == held


def test_a_difference_is_explained_to_the_byte(made: Made) -> None:
    report = made[1]
    other = analyze(zoo.build("mlp").model, *example("mlp"), optimizer="AdamW").step_report()
    for a, b in ((report, other), (other, report), (report, report)):
        found = diff(a, b)
        change = b.timeline.peak - a.timeline.peak
        assert found.peak.bytes == change
        assert sum(each.bytes for each in found.roles) == change
        scratch = [t.ops[t.peak_instant].scratch for t in (a.timeline, b.timeline)]
        assert sum(each.bytes for each in found.holders) == change - scratch[1] + scratch[0]
        assert found.to_text().startswith(("B peaks", "A and B peak"))


def example(name: str) -> tuple[Any, Any]:
    case = zoo.build(name)
    return case.args, case.kwargs


def test_a_plan_from_the_cache_has_the_same_report(tmp_path: Path) -> None:
    from remat import optimize_checkpoints

    def report() -> StepReport:
        case = zoo.build("mlp")
        model: Any = optimize_checkpoints(
            case.model,
            f"{least}B",
            case.args,
            case.kwargs,
            loss_fn=case.loss_fn,
            cache_dir=tmp_path,
            gap=1.0,
            optimizer=None,
            protocol=DROPPED,
        )
        found = model.remat.report()
        assert isinstance(found, StepReport)
        return found

    least = half_way("mlp", None, DROPPED).remat.plan.budget_bytes
    first, second = report(), report()
    assert second.baseline == first.baseline
    assert second.timeline == first.timeline


def test_an_analysis_is_the_report_of_its_step() -> None:
    case = zoo.build("gpt2")
    report = analyze(case.model, case.args, case.kwargs, optimizer="AdamW")
    for step in ("first", "steady"):
        shown = report.step_report(step=step, batch=3)
        assert shown.timeline.peak == report.peak_at(step=step, batch=3)
        assert shown.sizes["batch"] == 3
        assert shown.baseline is None
    on_gpu = analyze(
        case.model, case.args, case.kwargs, optimizer="AdamW", device="cuda:A100-80GB"
    )
    shown = on_gpu.step_report()
    assert shown.timeline.peak == on_gpu.peak_at(step="steady")
    assert all(tensor.bytes % 512 == 0 for tensor in shown.timeline.tensors)


WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None  # importing it now fails
    from pathlib import Path
    from remat.cli import main
    file, folder = sys.argv[1], sys.argv[2]
    ends = ["html", "json", "csv", "ops.csv", "txt", "trace.json", "trace.json.gz", "pickle", "svg"]
    outputs = [word for end in ends for word in ("-o", f"{folder}/again.{end}")]
    assert main(["report", file, *outputs]) == 0
    assert main(["diff", file, file]) == 0
    assert main(["compare", f"{folder}/again.pickle", file]) == 0
    assert Path(folder, "again.json").read_text() == Path(file).read_text()
"""


def test_files_are_read_and_written_without_torch(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    made[1].save(file)
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), str(file), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
