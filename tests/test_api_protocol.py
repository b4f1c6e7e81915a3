"""The step protocol: what the loop does besides the plan, planned for or reported."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import HUGE, LOOSE, Step, least, make, optimized, record, same

from remat import InfeasibleBudgetError, StepProtocol, measure_peak, optimize_checkpoints


def wide() -> nn.Module:
    layers = [(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def loss_fn(output: Tensor) -> Tensor:
    return output.pow(2).sum()


STEP = Step((torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),), loss=loss_fn)
OPTIONS: dict[str, Any] = {"optimizer": None, "loss_fn": loss_fn}
X = STEP.args[0]
BATCHES = [X, X + 1, X + 2]


def run(model: nn.Module, count: int, order: str) -> None:
    """Several forwards on batches of their own, then their backwards."""
    losses = []
    outputs = []
    for batch in BATCHES[:count]:
        outputs.append(model(batch))
        losses.append(loss_fn(outputs[-1]))
    if order == "summed":
        total = torch.stack(losses).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return
    for loss in losses if order == "first in" else reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]


def clean(model: nn.Module, count: int, order: str) -> None:
    run(model, count, order)
    model.zero_grad()


ORDERS = ("first in", "last in", "summed")


@pytest.mark.parametrize(
    ("room", "count"),
    [
        pytest.param(0.0, 3, marks=pytest.mark.slow),
        pytest.param(0.5, 2, marks=pytest.mark.slow),
        (0.0, 2),
        pytest.param(0.5, 3, marks=pytest.mark.slow),
    ],
)
def test_the_budget_holds_with_several_forwards_outstanding(count: int, room: float) -> None:
    protocol = StepProtocol(forwards_outstanding=count)
    ample = optimized(make(wide), STEP, HUGE, protocol=protocol, **OPTIONS).remat.plan
    low, high = ample.least_peak_bytes, ample.baseline_peak_bytes
    budget = int(low + room * (high - low))
    assert low < high
    model = optimized(make(wide), STEP, budget, protocol=protocol, **OPTIONS)
    plan = model.remat.plan
    assert plan.repetitions
    assert plan.peak_bytes <= budget
    resident = sum(t.nbytes for t in (*model.parameters(), *BATCHES[:count]))
    for order in ORDERS:
        assert resident + measure_peak(partial(clean, model, count, order)) <= budget
    assert model.remat.stats.plans == 1
    assert resident + measure_peak(partial(clean, make(wide), count, "first in")) > budget


@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=[pytest.mark.slow] * (o != "last in")) for o in ORDERS]
)
def test_the_budget_holds_when_their_gradients_are_accumulated(order: str) -> None:
    protocol = StepProtocol(forwards_outstanding=2, gradients_resident=True)
    model = optimized(make(wide), STEP, protocol=protocol, **OPTIONS)
    resident = sum(t.nbytes for t in (*model.parameters(), *BATCHES[:2]))
    gradients = sum(p.nbytes for p in model.parameters())
    peak = measure_peak(partial(run, model, 2, order), warmup=2)
    assert resident + gradients + peak <= model.remat.plan.budget_bytes


def test_outstanding_forwards_train_as_eager() -> None:
    seen = []
    protocol = StepProtocol(forwards_outstanding=2, gradients_resident=True)
    for model in (make(wide), optimized(make(wide), STEP, protocol=protocol, **OPTIONS)):
        torch.manual_seed(0)
        run(model, 2, "first in")
        run(model, 2, "summed")
        seen.append([p.grad for p in model.parameters()] + [torch.get_rng_state()])
    assert same(*seen)


@pytest.mark.slow
def test_asking_for_the_least_peak_of_several_forwards_succeeds_and_for_less_fails() -> None:
    protocol = StepProtocol(forwards_outstanding=2)
    budget = least(make(wide), STEP, protocol=protocol, **OPTIONS)
    with pytest.raises(InfeasibleBudgetError) as found:
        optimized(make(wide), STEP, budget - 1, protocol=protocol, **OPTIONS)
    assert found.value.least_peak_bytes == budget
    assert budget > least(make(wide), STEP, **OPTIONS)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = wide()

    def forward(self, x: Tensor) -> Any:
        logits = self.body(x).sin()
        return {"loss": logits.pow(2).sum(), "logits": logits}


def test_outputs_that_are_held_against_the_protocol_are_reported_once() -> None:
    step = Step((X,), loss=lambda output: output["loss"])
    dropped = StepProtocol(outputs_held=False)
    model = optimized(make(WithLogits), step, protocol=dropped, optimizer=None)
    for _ in range(2):
        model(X)["loss"].backward()
        model.zero_grad()
    held = model(X)
    with pytest.warns(UserWarning, match="1 outputs .8192 bytes. are still held") as caught:
        held["loss"].backward()
    assert caught[0].filename == __file__
    model.zero_grad()
    held = model(X)
    held["loss"].backward()
    before = X.nbytes + sum(p.nbytes for p in model.parameters())

    def loop() -> None:
        model(X)["loss"].backward()
        model.zero_grad()

    del held
    model.zero_grad()
    assert (
        before + measure_peak(loop) == model.remat.plan.peak_bytes <= model.remat.plan.budget_bytes
    )


def test_outputs_that_a_loss_outside_uses_are_not_reported() -> None:
    dropped = StepProtocol(outputs_held=False)
    model = optimized(make(wide), STEP, protocol=dropped, **OPTIONS)
    loss_fn(model(X)).backward()  # type: ignore[no-untyped-call]
    output = model.zero_grad() or model(X)
    with pytest.warns(UserWarning, match="are still held"):
        loss_fn(output).backward()  # type: ignore[no-untyped-call]


def test_an_optimizer_of_another_kind_that_steps_plans_anew() -> None:
    budget = HUGE
    model: Any = optimize_checkpoints(
        make(wide), f"{budget}B", STEP.args, loss_fn=loss_fn, **LOOSE
    )
    assert model.remat.plan.optimizer == "AdamW, assumed"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam([nn.Parameter(torch.ones(1, requires_grad=True))])
    for each in (optimizer, other):
        loss_fn(model(X)).backward()  # type: ignore[no-untyped-call]
        each.step()
        model.zero_grad()
    assert model.remat.stats.plans == 2
    assert model.remat.plan.optimizer.startswith("SGD, ")
    model(X)
    assert model.remat.stats.plans == 2
    assert record(model, STEP, 1)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_options_that_cost_memory_plan_anew_and_a_learning_rate_does_not(amsgrad: bool) -> None:
    model: Any = optimize_checkpoints(make(wide), 1, STEP.args, loss_fn=loss_fn, **LOOSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=amsgrad)
    loss_fn(model(X)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    model.zero_grad()
    model(X)
    assert model.remat.stats.plans == 1 + amsgrad


def test_a_live_optimizer_is_found() -> None:
    net = make(wide)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model: Any = optimize_checkpoints(net, 1, STEP.args, **LOOSE)
    assert model.remat.plan.optimizer == "SGD, found holding the parameters"
    assert len(optimizer.param_groups) == 1
