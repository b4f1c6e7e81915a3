"""`inplace=True`: the very object becomes the drop-in, and a failure leaves it as it was."""

import copy
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from remat import InfeasibleBudgetError, UnsupportedGraphError, optimize_checkpoints
from remat.identity import restore

BATCH = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output.square().mean()


class Slotted(Net):
    __slots__ = ("extra",)
    extra: int


def make() -> Any:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def budget() -> str:
    plan = vars(optimize_checkpoints(make(), 1, (BATCH,), time_limit_s=2))["remat"].plan
    return f"{(plan.least_peak_bytes + plan.baseline_peak_bytes) // 2}B"


def train(model: Any, optimizer: Any, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = model(BATCH)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def test_the_object_that_others_hold_trains_under_the_plan(budget: str) -> None:
    plain, model = make(), make()
    holder, optimizer = nn.ModuleDict({"model": model}), adam(model)
    returned = optimize_checkpoints(model, budget, inplace=True, time_limit_s=2)
    assert id(returned) == id(model)
    assert {Net, fx.GraphModule} <= set(type(model).__mro__)
    expected, seen = train(plain, adam(plain)), train(holder["model"], optimizer)
    assert all(map(torch.equal, expected, seen))
    assert model.remat.stats.planned == 3
    assert model.remat.plan.repetitions


def test_copies_pickles_and_keys_are_the_users(budget: str) -> None:
    model = make()
    keys = list(model.state_dict())
    optimize_checkpoints(model, budget, (BATCH,), inplace=True, time_limit_s=2)
    assert list(model.state_dict()) == keys
    assert type(pickle.loads(pickle.dumps(model))) is Net
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is Net
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.layers is not model.layers
    assert twin.remat.plan is None


def test_a_forward_patched_on_the_object_is_what_is_planned(budget: str) -> None:
    def doubled(self: Net, x: Tensor) -> Tensor:
        return 2 * Net.forward(self, x)

    plain, model = make(), make()
    for each in (plain, model):
        each.forward = MethodType(doubled, each)
    optimize_checkpoints(model, budget, inplace=True, time_limit_s=2)
    assert all(map(torch.equal, train(plain, adam(plain)), train(model, adam(model))))
    assert model.remat.stats.planned == 3
    restore(model)
    assert type(model) is Net
    assert vars(model)["forward"].__func__ is doubled
    assert vars(model).keys() == vars(plain).keys()


def test_a_failure_leaves_the_object_as_it_was(budget: str) -> None:
    model: Any = make()
    before = dict(vars(model))
    with pytest.raises(InfeasibleBudgetError):
        optimize_checkpoints(model, "1kB", (BATCH,), inplace=True, time_limit_s=2)
    cls: type = type(model)
    assert cls is Net
    assert vars(model) == before
    optimize_checkpoints(model, budget, (BATCH,), inplace=True, time_limit_s=2)
    planned = model.remat
    with pytest.raises(InfeasibleBudgetError):
        optimize_checkpoints(model, "1kB", (BATCH,), inplace=True, time_limit_s=2)
    assert model.remat is planned
    train(model, adam(model))
    assert planned.stats.planned == 3


def test_planning_again_in_place_begins_anew(budget: str) -> None:
    model = make()
    optimize_checkpoints(model, budget, (BATCH,), inplace=True, time_limit_s=2)
    cls, first = type(model), model.remat
    optimize_checkpoints(model, budget, inplace=True, time_limit_s=2)
    assert type(model) is cls
    assert model.remat is not first


def test_a_class_with_slots_can_be_changed_too(budget: str) -> None:
    model: Any = optimize_checkpoints(Slotted(), budget, (BATCH,), inplace=True, time_limit_s=2)
    assert issubclass(type(model), Slotted)
    model.extra = 3
    assert model.extra == 3
    restore(model)
    assert type(model) is Slotted
    assert model.extra == 3


def test_a_clash_of_names_is_refused_and_changes_nothing() -> None:
    model = make()
    model.meta = {}
    with pytest.raises(UnsupportedGraphError, match="meta"):
        optimize_checkpoints(model, 1, inplace=True, time_limit_s=2)
    assert type(model) is Net
    assert model.meta == {}
