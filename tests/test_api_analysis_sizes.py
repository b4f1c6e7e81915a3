"""`analyze` where models are particular about sizes, and about what they keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import measure_peak


class Frozen(dict[str, Any]):
    """A dict that cannot be changed, as configurations are."""

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("frozen")

    update = clear = __setitem__ = _refuse


class Blocks(nn.Module):
    """Takes sequences in blocks of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        blocks: Tensor = self.linear(x).view(batch, seq // 4, 4, width)
        return blocks.pow(2).mean()


class Positions(nn.Module):
    """Has a table of 100 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, 16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x + self.table[: x.shape[1]])
        return result.pow(2).mean()


def report_of(model: nn.Module) -> remat.MemoryReport:
    return remat.analyze(
        model,
        (torch.randn(4, 8, 16),),
        optimizer="AdamW",
        dynamic={"x": {0: "batch", 1: "seq"}},
    )


def measured(model: nn.Module, *shape: int) -> int:
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(shape)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure_peak(step, warmup=2)


def test_sizes_in_blocks() -> None:
    model = Blocks()
    report = report_of(model)
    for batch, seq in ((3, 12), (7, 40), (2, 128)):
        found = report.peak_at(step="steady", batch=batch, seq=seq)
        before = report.resident_at(batch=batch, seq=seq)
        assert found - before == measured(model, batch, seq, 16)
    assert "floor(seq/floor" not in str(report.peak)  # a number in the domain


def test_the_largest_is_a_size_that_runs() -> None:
    report = report_of(Blocks())
    budget = report.peak_at(batch=4, seq=40) + 10
    assert report.largest("seq", f"{budget}B") == 40
    assert report_of(Positions()).largest("seq", "1GB") == 100


def test_an_example_of_one_whose_loss_has_a_target_of_one() -> None:
    model, target = nn.Linear(16, 4), torch.randn(1, 4)
    report = remat.analyze(
        model, (torch.randn(1, 16),), loss_fn=lambda y: torch.dist(y, target.view(y.shape))
    )
    assert report.sizes == {"batch": 1}
    assert report.peak_at() == int(report.peak)


def test_what_forward_writes_into_nested_containers_is_taken_out_again() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.config = Frozen({"sizes": (1, 2), "names": ["a"]})
            self.log: dict[str, Any] = {"outputs": [], "scale": (torch.ones(8), 2)}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.log["scale"][0]
            self.log["outputs"].append(y)
            self.log.setdefault("last", {})["y"] = y
            return y.sum()

    model, x = Logs(), torch.randn(4, 8)
    report = remat.analyze(model, (x,), optimizer=None)
    assert list(model.log) == ["outputs", "scale"]
    assert model.log["outputs"] == []
    assert type(model.log["scale"][0]) is Tensor
    assert report.peak_at() > 0


def test_the_allocator_is_asked_for_unrounded_bytes() -> None:
    model = nn.Linear(10, 10, bias=False)  # 400 bytes, a block of 512
    report = remat.analyze(
        model, (torch.randn(3, 10),), loss_fn=torch.sum, optimizer=None, device="a100-80gb"
    )
    use = report.reserved_at()
    blocks = use.peak_allocated - 2 * report.overheads.cublas_workspace  # type: ignore[union-attr]
    asked = use.peak_requested - 2 * report.overheads.cublas_workspace  # type: ignore[union-attr]
    assert asked < blocks
    assert blocks % 512 == 0
    assert asked % 512
    assert str(use.peak_reserved) in str(use)


def test_evaluation_mode_is_said() -> None:
    with pytest.warns(UserWarning, match="evaluation mode"):
        remat.analyze(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), loss_fn=torch.sum)


def test_bad_names_and_steps_say_what_to_do() -> None:
    dynamic: Any = ["batch"]
    with pytest.raises(TypeError, match="maps arguments to names"):
        remat.analyze(nn.Linear(4, 4), (torch.randn(2, 4),), loss_fn=torch.sum, dynamic=dynamic)
    build: Callable[..., Any] = lambda n: None  # noqa: E731
    with pytest.raises(TypeError, match="build returns the step"):
        remat.analyze_step(build, {"n": 4})
