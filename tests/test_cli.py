"""The command line, each command in a process of its own, as a user would run it."""

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat.views.step_report import StepReport

ROOT = Path(__file__).resolve().parent.parent
TINY = "examples.models:gpt2_tiny"
BRIEF = ("--time-limit-s", "3")


def remat(*arguments: str, columns: int = 100, folder: Path = ROOT) -> Any:
    """Run the command in the repository."""
    return subprocess.run(
        [sys.executable, "-m", "remat", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A plan with all its files."""
    folder = tmp_path_factory.mktemp("report")
    out = folder / "out"
    return remat("plan", TINY, "--budget", "3500kB", *BRIEF, "--report", str(out)), out


def test_plan_prints_one_screen(planned: tuple[Any, Path]) -> None:
    ran, _ = planned
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100
    for part in (
        "planned",
        "budget",
        "peak at aten.",
        "recomputation +",
        "gap",
        "decisions",
        "transformer.h.*",
    ):
        assert part in ran.stdout


def test_plan_writes_every_format(planned: tuple[Any, Path]) -> None:
    ran, out = planned
    names = {path.name.partition(".")[2] for path in out.iterdir()}
    assert names >= {"html", "json", "trace.json.gz", "pickle", "csv", "ops.csv", "txt"}
    report = StepReport.from_json((out / "planned.json").read_text())
    assert report.timeline.peak <= 3_500_000 < (report.baseline.peak if report.baseline else 0)
    assert len(report.frontier) >= 2
    assert [p.peak_bytes <= p.budget_bytes for p in report.frontier] == [True] * len(
        report.frontier
    )
    overheads = [point.overhead for point in report.frontier]
    assert overheads == sorted(overheads, reverse=True)
    assert all(point.lower_bound <= point.overhead for point in report.frontier)
    with (out / "planned.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(report.timeline.tensors)
    assert pickle.loads((out / "planned.pickle").read_bytes())["device_traces"]
    assert "wrote" in ran.stderr


@pytest.mark.slow
def test_plan_as_json_prints_nothing_else() -> None:
    ran = remat("plan", TINY, "--budget", "3500kB", *BRIEF, "--json")
    assert ran.returncode == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert plan["peak_bytes"] <= plan["budget_bytes"] == 3_500_000
    assert plan["recomputed"]


def test_a_budget_that_nothing_fits() -> None:
    ran = remat("plan", TINY, "--budget", "100kB", *BRIEF)
    assert ran.returncode == 3
    assert ran.stdout == ""
    assert "least feasible peak" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_analyze_a_gpu_that_is_not_here() -> None:
    ran = remat(
        "analyze",
        *(TINY, "--device", "cuda:A100-80GB", "--dynamic", "input_ids=batch,_"),
        *("--dynamic", "labels=batch", "--at", "batch=3", "--json"),
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["device"] == "a100-80gb"
    assert report["sizes"] == {"batch": 3}
    assert "batch" in report["formulas"]["peak"]


@pytest.mark.slow
def test_analyze_says_what_fits() -> None:
    ran = remat("analyze", TINY, "--budget-gb", "0.01", "--largest", "batch")
    assert ran.returncode == 0, ran.stderr
    assert "peak = " in ran.stdout
    assert "largest batch that fits 0.01: " in ran.stdout
    assert int(ran.stdout.rpartition(": ")[2]) > 2


@pytest.mark.slow
def test_what_is_said_to_fit_fits_and_no_more() -> None:
    ran = remat("analyze", TINY, "--budget-gb", "0.01", "--largest", "batch")
    largest = int(ran.stdout.rpartition(": ")[2])
    at = remat("analyze", TINY, "--at", f"batch={largest}", "--json")
    over = remat("analyze", TINY, "--at", f"batch={largest + 1}", "--json")
    assert (
        json.loads(at.stdout)["steady"]["peak"]
        <= 10_000_000
        < json.loads(over.stdout)["steady"]["peak"]
    )


@pytest.mark.slow
def test_a_configuration_with_inputs(tmp_path: Path) -> None:
    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 32},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--input", "input_ids=2x16:int64", "--input", "labels=2x16:int64"]
    ran = remat("analyze", "config.json", *given, "--precision", "bf16", "--json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"] == "BertForMaskedLM"


def test_frontier() -> None:
    ran = remat("frontier", TINY, "--count", "3", *BRIEF, "--json")
    assert ran.returncode == 0, ran.stderr
    points = json.loads(ran.stdout)["points"]
    assert len(points) == 3
    assert points[-1]["overhead"] == 0
    assert points[0]["overhead"] >= points[1]["overhead"]


def test_report_reads_what_plan_wrote(planned: tuple[Any, Path], tmp_path: Path) -> None:
    ran, out = planned
    file = str(out / "planned.json")
    assert remat("report", file).stdout == ran.stdout
    assert max(map(len, remat("report", file, columns=60).stdout.splitlines())) <= 60
    page = tmp_path / "deep" / "plan.html"
    wrote = remat("report", file, "-o", str(page))
    assert (wrote.returncode, wrote.stdout) == (0, "")
    assert page.read_text() == (out / "planned.html").read_text()
    unknown = remat("report", file, "-o", "plan.docx")
    assert unknown.returncode == 2
    assert ".html" in unknown.stderr
    assert StepReport.from_json(remat("report", file, "--json").stdout).timeline.ops


def test_diff_of_eager_and_plan(planned: tuple[Any, Path]) -> None:
    _, out = planned
    file = out / "planned.json"
    report = StepReport.from_json(file.read_text())
    assert report.baseline is not None
    found = json.loads(remat("diff", str(file), "--json").stdout)
    assert (found["peak"]["before"], found["peak"]["after"]) == (
        report.baseline.peak,
        report.timeline.peak,
    )
    assert sum(r["after"] - r["before"] for r in found["roles"]) == (
        report.timeline.peak - report.baseline.peak
    )
    text = remat("diff", str(file)).stdout
    assert text.splitlines()[3].startswith("B peaks ")
    assert "B: GPT2LMHeadModel on cpu, planned under 3.50 MB" in text
    assert "below A" in text
    same = remat("diff", str(file), str(file)).stdout
    assert "A and B peak at the same" in same


def test_compare_with_the_predicted_snapshot(planned: tuple[Any, Path]) -> None:
    _, out = planned
    ran = remat("compare", str(out / "planned.pickle"), str(out / "planned.json"), "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["peak"]["measured"] == found["peak"]["predicted"]
    assert (found["difference"], found["only_predicted"], found["only_measured"]) == (0, [], [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", TINY], "a budget is needed"),
        (["plan", "nowhere:build", "--budget-gb", "1"], "nowhere"),
        (["plan", "os:absent", "--budget-gb", "1"], "absent"),
        (["analyze", TINY, "--input", "x=axb:int64"], "axb"),
        (["analyze", TINY, "--input", "x=2:int65"], "x=2:int65"),
        (["analyze", TINY, "--at", "batch=many"], "batch=many"),
        (["analyze", TINY, "--largest", "batch"], "--largest needs"),
        (["plan", TINY, "--budget-gb", "much"], "much"),
    ],
)
def test_what_cannot_be_meant_is_said(arguments: list[str], says: str) -> None:
    ran = remat(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["report", "README.md"], 2), (["diff", "absent.json"], 1), (["fly"], 2), ([], 2)],
)
def test_files_that_are_no_reports(arguments: list[str], status: int) -> None:
    ran = remat(*arguments)
    assert ran.returncode == status
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "command",
    ["analyze", "plan", "frontier", "report", "compare", "diff", "doctor", "run", "completion"],
)
def test_help_teaches(command: str) -> None:
    ran = remat(command, "--help")
    assert ran.returncode == 0
    assert f"remat {command}" in ran.stdout
    if command not in ("doctor", "run", "completion"):
        assert "examples:" in ran.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str) -> None:
    ran = remat("completion", shell)
    assert ran.returncode == 0
    for command in ("analyze", "plan", "frontier", "--budget-gb"):
        assert command in ran.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=ran.stdout, text=True, check=True)
