"""What the launcher plans, in this process: which modules, when, and what it says of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat import InfeasibleBudgetError, optimize_checkpoints
from remat.launched import Launched
from remat.outstanding import left_bytes
from remat.settings import Settings
from remat.summary import summary
from remat.views.step_report import StepReport

BATCH = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
CALL = nn.Module.__call__
Start = Callable[..., Launched]

pytestmark = pytest.mark.filterwarnings("ignore:remat")


class Net(nn.Module):
    def __init__(self, last: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)),
        )
        self.last = nn.Linear(16, last)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.layers(x))
        return output


class Branches(Net):
    """Its way depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if output.sum().item() > 0 else 2 * output


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(Optimizer, "__init__", Optimizer.__init__)
    monkeypatch.setattr(nn.Module, "__call__", CALL)

    def begin(**options: Any) -> Launched:
        launched = Launched(
            Settings({"budget_gb": 1.0, "time_limit_s": 1.0, "gap": 0.2, **options}, {})
        )
        launched.begin()
        return launched

    yield begin
    monkeypatch.undo()
    assert nn.Module.__call__ is CALL


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)


def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    loss: Tensor = model(BATCH).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def planned(model: nn.Module) -> int:
    return vars(model)["remat"].stats.planned  # type: ignore[no-any-return]


def test_the_outermost_module_that_the_optimizer_trains_is_planned_from_its_first_call(
    start: Start,
) -> None:
    launched = start()
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer)
    assert nn.Module.__call__ is CALL
    assert type(model.last) is nn.Linear
    assert [(f.name, f.stats.planned, f.early) for f in launched.found] == [("Net", 3, 0)]
    assert "3 planned, 0 not; 1 plans made" in summary(launched)
    assert "NOTHING" not in summary(launched)


def test_losses_are_eagers_and_the_budget_is_kept_to(start: Start) -> None:
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    optimizer = sgd(plain)
    expected = [step(plain, optimizer) for _ in range(3)]
    report = optimize_checkpoints(Net(), 1, (BATCH,), optimizer="SGD")
    plan = vars(report)["remat"].plan
    budget = (plan.least_peak_bytes + plan.baseline_peak_bytes) // 2
    launched = start(budget_gb=f"{budget}B")
    optimizer = sgd(model)
    assert [step(model, optimizer) for _ in range(3)] == expected
    (found,) = launched.found
    assert found.plan is not None
    assert not found.plan.is_eager
    assert found.plan.peak_bytes <= budget
    assert found.plan.optimizer == "SGD, found holding the parameters"


def test_calls_before_the_optimizer_are_counted(start: Start) -> None:
    launched = start()
    model = Net()
    model(BATCH).sum().backward()
    optimizer = sgd(model)
    step(model, optimizer)
    assert [(f.stats.planned, f.early) for f in launched.found] == [(1, 1)]
    assert "1 before an optimizer held its parameters" in summary(launched)
    assert nn.Module.__call__ is CALL


def test_two_models_in_a_step_are_both_planned_and_count_each_other(start: Start) -> None:
    launched = start()
    maker, judge = Net(), Net(last=1)
    first, second = sgd(maker), torch.optim.Adam(judge.parameters())
    for _ in range(2):
        made = maker(BATCH)
        judge(made.detach()).mean().backward()
        second.step()
        judge(made).mean().backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
    assert [f.name for f in launched.found] == ["Net", "Net"]
    size = sum(p.nbytes for p in judge.parameters())
    # Parameters, gradients and two moments of the judge, with a step count for every parameter.
    assert launched.found[0].other_bytes == 4 * size + 4 * len(list(judge.parameters()))
    assert launched.found[1].other_bytes == 2 * sum(p.nbytes for p in maker.parameters())
    assert planned(maker) == 2
    assert planned(judge) == 4
    assert vars(judge)["remat"].stats.plans == 2  # its input requires a gradient, or does not
    assert "2 modules have plans of their own" in summary(launched)


def test_a_forward_that_waits_for_its_backward_is_counted_by_the_next_plan(start: Start) -> None:
    plan = vars(optimize_checkpoints(Net(), 1, (BATCH,), optimizer="SGD"))["remat"].plan
    maker, judge = Net(), nn.Linear(16, 1)
    known = sum(p.nbytes for p in judge.parameters())
    middle = (plan.least_peak_bytes + plan.baseline_peak_bytes) // 2
    launched = start(budget_gb=f"{middle + 2 * known}B")
    optimizers = sgd(maker), sgd(judge)
    judge(maker(BATCH)).mean().backward()
    assert len(optimizers) == len(launched.found) == 2
    left = left_bytes(vars(maker)["remat"].planned.trace)
    assert left > maker(BATCH).nbytes
    known = 2 * sum(p.nbytes for p in maker.parameters())
    assert launched.found[1].other_bytes == known + left


def test_a_later_optimizer_is_seen(start: Start) -> None:
    launched = start()
    first, second = Net(), Net()
    step(first, sgd(first))
    assert nn.Module.__call__ is CALL
    step(second, sgd(second))
    assert nn.Module.__call__ is CALL
    assert len(launched.found) == 2


def test_modules_that_own_little_are_left_as_they_are(start: Start) -> None:
    launched = start()
    model, scale = Net(), nn.Linear(1, 1)
    optimizer = sgd(model, scale)
    for _ in range(3):
        scale(model(BATCH).mean().view(1)).backward()
        optimizer.step()
    assert [f.name for f in launched.found] == ["Net"]
    assert nn.Module.__call__ is CALL  # the optimizer has stepped: it has no other model
    assert "Linear owns little" in summary(launched)


def test_a_wrapper_is_looked_through(start: Start) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Any:
            return self.module(x)

    launched = start()
    model = DistributedDataParallel(Net())
    step(model, sgd(model))
    assert [f.name for f in launched.found] == ["Net"]


def test_a_model_that_the_script_has_planned_is_left_alone(start: Start) -> None:
    launched = start()
    model = optimize_checkpoints(Net(), 1, optimizer="SGD")
    remat = vars(model)["remat"]
    step(model, sgd(model))
    assert vars(model)["remat"] is remat
    assert "planned by the script itself" in summary(launched)
    assert launched.found[0].stats.planned == 1


def test_what_cannot_be_captured_is_trained_as_before(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, model = Branches(), Branches()
    model.load_state_dict(plain.state_dict())
    optimizer = sgd(plain)
    expected = [step(plain, optimizer) for _ in range(2)]
    launched = start()
    optimizer = sgd(model)
    assert [step(model, optimizer) for _ in range(2)] == expected
    assert type(model) is Branches
    assert vars(model).keys() == vars(plain).keys()
    said = capsys.readouterr().err
    assert said.count("trained as before") == 1
    assert "test_launched.py" in said  # the user's line
    assert "NOTHING RAN UNDER A PLAN" in summary(launched)
    assert "Branches was NOT planned" in summary(launched)


def test_an_infeasible_budget_is_said_or_raised(start: Start) -> None:
    launched = start(budget_gb="1kB")
    model = Net()
    step(model, sgd(model))
    assert "InfeasibleBudgetError" in launched.found[0].failure
    assert type(model) is Net


def test_on_failure_raise_raises(start: Start) -> None:
    start(budget_gb="1kB", on_failure="raise")
    model = Net()
    optimizer = sgd(model)
    with pytest.raises(InfeasibleBudgetError):
        step(model, optimizer)


def test_a_plan_that_fails_later_leaves_the_rest_to_eager(start: Start) -> None:
    plan = vars(optimize_checkpoints(Net(), 1, (BATCH,), optimizer="SGD"))["remat"].plan
    launched = start(budget_gb=f"{plan.least_peak_bytes + 1000}B")
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):  # gradients add up, which takes more than the budget
        model(BATCH).square().mean().backward()
    optimizer.step()
    (found,) = launched.found
    assert found.stats.planned >= 1
    assert "from then on without a cap: InfeasibleBudgetError" in summary(launched)


def test_a_compiled_model_is_left_to_its_compiler(start: Start) -> None:
    launched = start()
    model = torch.compile(Net(), backend="eager")
    assert isinstance(model, nn.Module)
    step(model, sgd(model))
    assert "compiled by torch.compile" in launched.found[0].failure


def test_without_an_optimizer_nothing_is_planned_and_that_is_said(start: Start) -> None:
    launched = start()
    Net()(BATCH).sum().backward()
    assert launched.found == []
    assert "NOTHING RAN UNDER A PLAN. The script has no torch.optim.Optimizer" in summary(launched)


def test_reports_are_written_per_model(start: Start, tmp_path: Any) -> None:
    launched = start(report_dir=str(tmp_path / "report"))
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    step(model, optimizer)
    launched.finish()
    report = StepReport.from_json((tmp_path / "report" / "Net-0.json").read_text())
    assert report.budget_bytes == 10**9
    assert (tmp_path / "report" / "Net-0.html").read_text().startswith("<!doctype html>")
    assert "calls: 2 planned, 0 fallbacks" in (tmp_path / "report" / "Net-0.txt").read_text()
