"""Bad input: a clear error, and everything as it was before."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import LOOSE, Step, make, same

from remat import (
    InfeasibleBudgetError,
    RematError,
    UnsupportedGraphError,
    optimize_checkpoints,
    plan_checkpoints,
)

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls = 0
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.norm(self.lin(x)).tanh(), 0.5)


class Branch(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        if hidden.sum() > 0:  # the user's line
            return hidden.sin()
        return hidden


class Masked(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[x[:, 0] > 0].sin()


class Remembers(Plain):
    def forward(self, x: Tensor) -> Any:
        self.last = super().forward(x)
        return self.last.sin()


class Counts(Plain):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls


class Logs(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.log.append(hidden)
        return hidden.sin()


class Skips(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return hidden if random.random() < 2 else x


class SkipsNumpy(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return hidden if numpy.random.rand() < 2 else x


class Frozen(Plain):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return super().forward(x)


class Grows(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Any:
        self.seen = torch.cat([self.seen, x])
        return super().forward(x)


class Recurrent(Plain):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 4, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.rnn(x[:, None])[0][:, 0])


def state(model: nn.Module) -> list[Any]:
    """All that a failed call might have changed."""
    attributes = [
        (name, key, value)
        for name, child in model.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, int | float | str | bool) or key == "log"
    ]
    return [
        copy.deepcopy(list(model.state_dict().items())),
        [(id(p), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        [(id(b), type(b)) for b in model.buffers()],
        copy.deepcopy(attributes),
        sorted(key for child in model.modules() for key in vars(child)),
        [torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())],
    ]


def refuse(model: nn.Module, error: type[Exception], match: str, budget: Any = 1) -> str:
    """Optimising raises and changes nothing; the model still works. Returns the message."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state(model)
    with pytest.raises(error, match=match) as found:
        optimize_checkpoints(model, budget, (X,), **LOOSE)
    assert same(state(model), before)
    assert all(type(t) in (nn.Parameter, Tensor) for t in (*model.parameters(), *model.buffers()))
    return str(found.value)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Branch, "if hidden.sum"),
        (Masked, "depends on data"),
        (Remembers, "changes attribute last"),
        (Counts, "changes attribute calls"),
        (Logs, "changes attribute log"),
        (Skips, "Python's random generator"),
        (SkipsNumpy, "NumPy's random generator"),
        (Frozen, "no output of the model requires a gradient"),
        (Grows, "replaces the buffer seen"),
        (lambda: Recurrent(nn.LSTM), "rnn is an nn.LSTM"),
        (lambda: Recurrent(nn.GRU), "rnn is an nn.GRU"),
        (lambda: Recurrent(nn.RNN), "rnn is an nn.RNN"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_nothing_is_changed(kind: Any, match: str) -> None:
    refuse(make(kind), UnsupportedGraphError, match)


def test_data_dependent_control_flow_names_the_users_line() -> None:
    message = refuse(make(Branch), UnsupportedGraphError, "could not be captured")
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "# the user's line" in text)
    assert f"{__file__}:{line}: if hidden.sum() > 0:" in message


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), "0B", "-3GB", "1e-12GB"])
def test_budgets_that_are_not_above_zero(budget: Any) -> None:
    refuse(make(Plain), ValueError, "budget", budget)


@pytest.mark.parametrize("budget", ["lots", "10 parsecs", "", "GB", "1..2GB", "80 percent"])
def test_budgets_that_cannot_be_read(budget: str) -> None:
    refuse(make(Plain), ValueError, "cannot read the budget", budget)


@pytest.mark.parametrize("budget", [True, None, [8], 8j, torch.tensor(8.0)])
def test_budgets_of_other_types(budget: Any) -> None:
    refuse(make(Plain), TypeError, "must be a number of GB or a string", budget)


def test_an_infeasible_budget() -> None:
    message = refuse(
        make(Plain), InfeasibleBudgetError, "no plan fits a budget of 1000 bytes", "1kB"
    )
    for part in ("least feasible peak", "reached at", "filled by", "would"):
        assert part in message


def test_an_infeasible_budget_on_the_first_training_call_leaves_the_model_usable() -> None:
    model: Any = optimize_checkpoints(make(Plain), "1kB", **LOOSE)
    before = state(model)
    with pytest.raises(InfeasibleBudgetError):
        model(X)
    assert same(state(model), before)
    model.remat.disable()
    assert model(X).requires_grad


def test_inputs_that_do_not_fit_the_model() -> None:
    model = make(Plain)
    before = state(model)
    with pytest.raises(UnsupportedGraphError, match=r"self.norm\(self.lin\(x\)\)"):
        optimize_checkpoints(model, 1, (X[:, :3],))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        optimize_checkpoints(model, 1, (), {"y": X})
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        optimize_checkpoints(torch.tanh, 1)  # type: ignore[arg-type]
    assert same(state(model), before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "adamwant"}, "no optimizer 'adamwant'"),
        ({"cost_model": "abacus"}, "abacus"),
        ({"time_limit_s": 0.0}, "time_limit_s"),
        ({"gap": -0.1}, "gap"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, RematError), match=match):
        optimize_checkpoints(make(Plain), 1, (X,), **options)


def test_a_cache_that_exists_before_planning_is_no_obstacle() -> None:
    class Caches(Plain):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            if self.mask is None:
                self.mask = torch.ones(x.shape)
            return super().forward(x) * self.mask

    refuse(make(Caches), UnsupportedGraphError, "run one forward before")
    model = make(Caches)
    model(X)
    step = Step((X,))
    optimized: Any = optimize_checkpoints(model, 1, step.args, **LOOSE)
    assert optimized(X).requires_grad
    assert type(model.mask) is Tensor


def test_a_part_of_the_device_is_of_the_one_that_the_plan_is_for() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(4, 8)
    plan = plan_checkpoints(
        model, "50%", (x,), optimizer=None, loss_fn=torch.sum, cost_model="rtx4090"
    )
    assert plan.budget_bytes == 12 * 10**9
