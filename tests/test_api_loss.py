"""A loss outside the model: which outputs it uses, what it holds, and what it must be."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import HUGE, Step, make, optimized, trained_alike

from remat import optimize_checkpoints

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """Features, other features, and a scalar temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.one, self.other = nn.Linear(64, 4), nn.Linear(64, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        return self.one(hidden), self.other(hidden), self.scale.exp()


def scaled(output: Any) -> Tensor:
    product: Tensor = output[0] * output[2]
    return product.pow(2).mean()


def to_target(output: Any) -> Tensor:
    return nn.functional.mse_loss(output[0], TARGET)


@pytest.mark.parametrize(
    ("loss", "used"), [(scaled, (0, 2)), (to_target, (0,)), (lambda output: output[2], (2,))]
)
def test_the_outputs_that_the_loss_uses_receive_gradients(loss: Any, used: Any) -> None:
    step = Step((X,), loss=loss)
    model = optimized(make(Heads), step, HUGE, loss_fn=loss, optimizer=None)
    assert model.remat.planned.prepared.capture.gradient_outputs == used


def test_a_loss_over_features_and_a_scalar_trains_alike() -> None:
    trained_alike(Heads, Step((X,), loss=scaled), count=1, loss_fn=scaled, optimizer=None)


def test_targets_are_resident() -> None:
    step = Step((X,), loss=to_target)
    options: dict[str, Any] = {"loss_fn": to_target, "optimizer": None}
    plan = optimized(make(Heads), step, HUGE, **options).remat.plan
    state = sum(p.nbytes for p in make(Heads).parameters())
    assert plan.resident_bytes == state + X.nbytes + TARGET.nbytes


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda output: output[0], r"one scalar, got shape \[64, 4\]"),
        (lambda output: 1.0, "one scalar, got float"),
        (lambda output: output[0].detach().sum(), "requires a gradient"),
    ],
)
def test_a_loss_is_one_scalar(loss: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        optimize_checkpoints(make(Heads), 1, (X,), loss_fn=loss, optimizer=None)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss_fn": nn.CrossEntropyLoss()}, TypeError, "lambda output: criterion"),
    ({"example_args": X}, TypeError, r"pass \(x,\)"),
    ({"optimizer": [1]}, TypeError, "one torch.optim.Optimizer"),
    ({"optimizer": torch.optim.SGD([X])}, ValueError, "none of the model's parameters"),
    ({"budget_gb": float("inf")}, ValueError, "finite"),
    ({"budget_gb": "120%"}, ValueError, "at most 100%"),
]


@pytest.mark.parametrize(("options", "error", "match"), OPTIONS)
def test_options_that_cannot_be_meant(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        optimize_checkpoints(make(Heads), **{"budget_gb": 1, "example_args": (X,), **options})


@pytest.mark.parametrize(
    ("gpu", "used"), [("NVIDIA A10G", "generic-gpu"), ("NVIDIA H200", "NVIDIA H200")]
)
def test_an_unknown_gpu_is_planned_as_a_generic_one(gpu: str, used: str) -> None:
    assert import_module("remat.options")._known_or_generic(gpu) == used


def test_lazy_names_are_listed() -> None:
    package: Any = import_module("remat")
    assert set(package.__all__) <= set(dir(package))
