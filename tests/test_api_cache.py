"""The plan cache: the same plan without a search, stale files, several processes.

What is found without capturing the step is tested in `test_starts`; here it is forgotten first.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import Step, least, make, record, same

import remat.planner
from remat import StepProtocol, optimize_checkpoints
from remat.cache import fingerprint
from remat.planned import step_of
from remat.request import surroundings


def net() -> nn.Module:
    first = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
    return nn.Sequential(first, nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))


def longer() -> nn.Module:
    return nn.Sequential(net(), nn.ReLU())


STEP = Step((torch.randn(64, 8, generator=torch.Generator().manual_seed(0)),))


@pytest.fixture(scope="module")
def budget() -> int:
    return least(make(net), STEP)


def planned(budget: int, folder: Path, build: Any = net, **options: Any) -> Any:
    options = {"gap": 1.0, "time_limit_s": 5.0, "cache_dir": folder, **options}
    return optimize_checkpoints(make(build), f"{budget}B", STEP.args, **options)


@pytest.fixture(scope="module")
def good(budget: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Name and content of the file of the plain plan."""
    folder = tmp_path_factory.mktemp("good")
    planned(budget, folder)
    return file_of(folder).name, file_of(folder).read_text()


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("searched")

    for name in ("arranged", "solve_windows", "least_peak", "eager_of", "op_times"):
        monkeypatch.setattr(remat.planner, name, fail)


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def forget_programs(folder: Path) -> None:
    """Leave plans to be found by their captured graphs."""
    for path in folder.glob("*.program"):
        path.unlink()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"protocol": StepProtocol(forwards_outstanding=2)},
        {"dynamic": {"input": {0: "batch"}}},
        {"recompute": ("0",)},
    ],
    ids=["plain", "two forwards", "dynamic", "pattern"],
)
def test_a_second_plan_is_the_same_without_a_search(
    options: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    budget = least(make(net), STEP, **options)
    first = planned(budget, tmp_path, **options)
    request.getfixturevalue("no_search")
    forget_programs(tmp_path)
    second = planned(budget, tmp_path, **options)
    assert (first.remat.planned.from_file, second.remat.planned.from_file) == (False, True)
    assert not first.remat.plan.is_eager
    assert first.remat.plan.repetitions
    assert second.remat.plan == first.remat.plan
    assert second.remat.plan.to_json() == first.remat.plan.to_json()
    for graph in ("forward_graph", "backward_graph"):
        codes = [getattr(model.remat, graph).code for model in (first, second)]
        assert codes[0] == codes[1]
    assert same(record(second, STEP), record(make(net), STEP))
    assert second.remat.stats.planned == 2
    assert "found in the cache" in second.remat.explain()


def test_a_reordered_plan_comes_back_in_its_order(tmp_path: Path, no_search_later: Any) -> None:
    class Wide(nn.Module):
        """Two large results, each of which is summed up: the captured order holds both."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 256), nn.Linear(8, 256)

        def forward(self, x: Any) -> Any:
            left, right = self.a(x), self.b(x)
            return left.tanh().sum(1) + right.sin().sum(1)

    low = least(make(Wide), STEP)
    first = planned(low, tmp_path, Wide)
    assert first.remat.plan.reordered
    no_search_later()
    forget_programs(tmp_path)
    second = planned(low, tmp_path, Wide)
    assert second.remat.plan == first.remat.plan
    assert same(record(second, STEP), record(make(Wide), STEP))


@pytest.fixture
def no_search_later(request: pytest.FixtureRequest) -> Any:
    return lambda: request.getfixturevalue("no_search")


def test_a_plan_that_runs_the_model_as_it_is_comes_back_with_its_trace(
    tmp_path: Path, no_search_later: Any
) -> None:
    first = planned(10**12, tmp_path)
    no_search_later()
    forget_programs(tmp_path)
    second = planned(10**12, tmp_path)
    assert second.remat.planned.from_file
    assert second.remat.plan == first.remat.plan
    assert second.remat.planned.trace == first.remat.planned.trace


def test_other_steps_have_other_files(budget: int, tmp_path: Path) -> None:
    planned(budget, tmp_path)
    planned(budget + 4096, tmp_path)
    planned(budget, tmp_path, optimizer="sgd")
    planned(budget, tmp_path, protocol=StepProtocol(outputs_held=False))
    planned(budget, tmp_path, longer)
    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.program"))) == 5


def broken(kind: str, text: str) -> str:
    data = json.loads(text)
    plan = data["plan"]
    if kind == "cut short":
        return text[: len(text) // 2]
    if kind == "empty":
        return ""
    if kind == "no object":
        return "[]"
    if kind == "of another step":
        data["fingerprint"] = "0" * 64
    elif kind == "a lower peak":
        plan["peak_bytes"] -= 64
    elif kind == "a step less":
        last = max(i for i, name in enumerate(plan["steps"]) if plan["steps"].count(name) > 1)
        del plan["steps"][last]
    elif kind == "an unknown op":
        plan["steps"][3] = "conv_of_yore"
    elif kind == "another order":
        plan["steps"].reverse()
    else:
        plan["reused"] = []
    return json.dumps(data)


@pytest.mark.parametrize(
    "kind",
    [
        "cut short",
        "empty",
        "no object",
        "of another step",
        "a lower peak",
        "a step less",
        "an unknown op",
        "another order",
        "other reuse",
    ],
)
def test_a_stale_file_is_reported_once_and_replaced(
    kind: str, budget: int, good: tuple[str, str], tmp_path: Path
) -> None:
    name, text = good
    path = tmp_path / name
    path.write_text(broken(kind, text))
    with pytest.warns(UserWarning, match="stale") as caught:
        again = planned(budget, tmp_path)
    assert len(caught) == 1
    assert not again.remat.planned.from_file
    assert path.read_text() == text
    assert file_of(tmp_path) == path


def test_a_folder_that_cannot_be_written_is_reported_and_the_plan_is_used(
    budget: int, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be kept") as caught:
        model = planned(budget, tmp_path / "file")
    assert len(caught) == 1
    assert not model.remat.plan.is_eager


SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_api_cache import forget_programs, planned
if len(sys.argv) > 4:
    forget_programs(Path(sys.argv[3]))
model = planned(int(sys.argv[2]), Path(sys.argv[3]))
print(model.remat.planned.from_file, model.remat.plan.to_json().replace("\\n", ""))
"""


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="by its start"),
        pytest.param(["forget"], id="by its graph", marks=pytest.mark.slow),
    ],
)
def test_two_processes_that_write_at_once_leave_one_whole_file_for_a_third(
    more: list[str], budget: int, tmp_path: Path
) -> None:
    def start(seed: str, *more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(budget)]
        env = {"PYTHONHASHSEED": seed, "KINETO_LOG_LEVEL": "5"}
        return subprocess.Popen(
            [*command, str(tmp_path), *more], stdout=subprocess.PIPE, text=True, env=env
        )

    both = [start("1"), start("2")]
    texts = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    third = start("3", *more)
    found, _, plan = third.communicate()[0].partition(" ")
    assert found == "True"
    assert plan in [text.partition(" ")[2] for text in texts]
    assert file_of(tmp_path).suffix == ".json"


def test_a_fingerprint_is_the_name_of_the_file(budget: int, good: tuple[str, str]) -> None:
    model: Any = optimize_checkpoints(
        make(net), f"{budget}B", STEP.args, gap=1.0, time_limit_s=5.0
    )
    request, prepared = model.remat.planned.request, model.remat.planned.prepared
    step = step_of(request, prepared, surroundings(request, prepared))
    assert good[0] == f"{fingerprint(step)[:32]}.json"
    assert json.loads(good[1])["fingerprint"] == fingerprint(step)
