"""Group A of the public reports: dropout and the random stream."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from twins import Step, budgets, make, optimized, record, same, trained_alike


def mlp(layers: int = 4, width: int = 16, p: float = 0.5) -> nn.Module:
    layer = [(nn.Linear(width, width), nn.Tanh(), nn.Dropout(p)) for _ in range(layers)]
    return nn.Sequential(*(module for modules in layer for module in modules))


# pytorch#190758
@pytest.mark.slow
def test_dropout_gradients_equal_finite_differences_at_ten_budgets() -> None:
    step = Step((torch.randn(32, 16, dtype=torch.float64),))

    def build() -> nn.Module:
        return mlp(layers=2).double()

    direction = [torch.randn_like(p) for p in make(build).parameters()]
    for budget in budgets(make(build), step, count=9):
        model = optimized(make(build), step, budget)
        torch.manual_seed(3)
        loss = step.loss(model(*step.args))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p.add_(d, alpha=sign * 1e-6)
            torch.manual_seed(3)
            values.append(step.loss(model(*step.args)).item())
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p.sub_(d, alpha=sign * 1e-6)
        # central differences: rounding leaves 1e-16 / 1e-6 of the value, curvature 1e-12
        assert float(slope) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Any:
        return functional.dropout(x * self.w, 0.5).exp().sin()


# pytorch#190717
def test_forward_and_backward_see_one_mask() -> None:
    x = torch.rand(64, 64).add_(1).requires_grad_()
    step = Step((x,), loss=lambda output: output.sum())
    for budget in budgets(make(Mask), step, count=3):
        model = optimized(make(Mask), step, budget)
        x.grad = None
        output = model(x)
        output.sum().backward()
        assert x.grad is not None
        # exp(0).sin() where the mask is 0
        dropped = output == torch.tensor(0.0).exp().sin()
        assert 0 < int(dropped.sum()) < x.numel()
        assert torch.equal(x.grad == 0, dropped)


# OLMo-core#828
def test_the_loss_curve_of_twenty_steps_is_eagers() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    trained_alike(build, Step((torch.randn(2, 4, 8),)), steps=20, count=1)


# pytorch#121966
def test_dropout_under_autocast() -> None:
    step = Step(
        (torch.randn(501, 33, requires_grad=True),),
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(33, 33)

        def forward(self, x: Tensor) -> Any:
            return functional.dropout(self.lin(x) * 5, 0.5).tanh()

    trained_alike(Scaled, step)


# OLMo#105: the whole step is one graph, with dropout in it
def test_dropout_is_part_of_the_one_graph() -> None:
    model = optimized(make(mlp), Step((torch.randn(64, 16),)))
    code = model.remat.forward_graph.print_readable(print_output=False)
    assert code.count("torch.ops.aten.bernoulli") == 4


# pytorch#14253
def test_a_draw_after_the_step_is_eagers() -> None:
    step = Step((torch.randn(64, 16),))
    draws = []
    for model in (make(mlp), optimized(make(mlp), step)):
        record(model, step, 1)
        draws.append(torch.rand(5))
    assert same(*draws)


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        functional.dropout(x, 0.5)
        hidden = self.lin(x).tanh()
        torch.rand(3)
        torch.randn_like(hidden)
        return functional.dropout(hidden, 0.3).sin()


def test_a_random_op_whose_result_is_unused_still_advances_the_stream() -> None:
    trained_alike(Wasteful, Step((torch.randn(64, 16),)))


def test_recomputed_dropout_is_in_use() -> None:
    plans = trained_alike(lambda: mlp(p=0.3), Step((torch.randn(256, 16),)))
    assert any("bernoulli" in name for plan in plans for name in plan.repetitions)
