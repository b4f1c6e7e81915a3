"""State of modules that a plan has read: every change is noticed, none that is no change."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import optimize_checkpoints

QUICK: dict[str, Any] = {"time_limit_s": 1.0, "gap": 1.0, "recompute": ("::aten.tanh*",)}


ONE = torch.ones(1)


BETA = 0.0


def shifted(y: Tensor) -> Tensor:
    return y + BETA


class Net(nn.Module):
    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterDict({"a": nn.Parameter(ONE)})
        self.layers, self.none = nn.Sequential(nn.Tanh()), nn.ModuleList()
        self.register_module("last", None)
        self.register_buffer("square", torch.arange(256.0).reshape(16, 16) / 256)
        self.act: Callable[[Tensor], Tensor] = torch.relu
        self.mask = torch.ones(16)
        self.dtype = torch.float32
        self.alpha: Any = 2.0
        self.once: Any = True
        self.known = {1, 2, 3, 4, 16}
        for i in range(6):
            self.register_buffer(f"table_{i}", torch.ones(1), persistent=False)

    def helped(self, y: Tensor) -> Tensor:
        return shifted(y)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x).tanh() * self.mask * self.alpha)
        y = y.to(self.dtype).float()
        if self.flag:
            y = y + 1
        if hasattr(self, "extra"):
            y = y * self.extra  # type: ignore[operator]
        for scale in self.scales:
            y = y * scale
        for shift in self.shifts.values():
            y = y + shift
        for layer in (*self.none, *([self.last] if self.last else [])):
            y = layer(y)
        y = self.helped(y)
        y = self.layers(y) @ self.square + (1 if self.once is True else 2)
        result: Tensor = self.b(y).tanh().sum()
        return result


def other_beta(model: Any) -> None:
    globals()["BETA"] = 0.5


def other_function(model: Any) -> None:
    globals()["shifted"] = torch.cos


def transposed(model: Any) -> None:
    model.square.data = model.square.data.T  # the same address and sizes


def patched_forward(model: Any) -> None:
    model.b.forward = lambda x: x * 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "over the class's": lambda m: setattr(m, "flag", True),
    "new": lambda m: setattr(m, "extra", 0.5),
    "function": lambda m: setattr(m, "act", torch.sigmoid),
    "tensor": lambda m: setattr(m, "mask", torch.zeros(16)),
    "type": lambda m: setattr(m, "dtype", torch.bfloat16),
    "number to tensor": lambda m: setattr(m, "alpha", torch.full((16,), 0.5)),
    "forward of a submodule": patched_forward,
    "parameter that was None": lambda m: setattr(m.b, "bias", nn.Parameter(torch.ones(16))),
    "parameter in a list that was empty": lambda m: m.scales.append(nn.Parameter(2 * ONE)),
    "parameter in a dict": lambda m: m.shifts.update({"b": nn.Parameter(2 * ONE)}),
    "submodule in a list": lambda m: m.layers.append(nn.Tanh()),
    "submodule in a list that was empty": lambda m: m.none.append(nn.Tanh()),
    "submodule that is None": lambda m: setattr(m, "last", nn.Tanh()),
    "buffer of the same memory": transposed,
    "global that a function reads": other_beta,
    "global function": other_function,
    "one for True": lambda m: setattr(m, "once", 1),
}


@pytest.mark.filterwarnings("ignore:remat")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "BETA", BETA)  # as they were, afterwards
    monkeypatch.setitem(globals(), "shifted", shifted)
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    plain: Any = Net()
    model: Any = optimize_checkpoints(Net(), "1GB", (x,), **QUICK)
    model.load_state_dict(plain.state_dict())
    assert not model.remat.plan.is_eager
    assert torch.equal(model(x), plain(x))
    for one in (model, plain):
        change(one)
    losses = [one(x) for one in (model, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert torch.equal(model.a.weight.grad, plain.a.weight.grad)
    stats = model.remat.stats
    assert sum(stats.fallbacks.values()) + sum(stats.replanned.values()) == 1


def test_transforms_of_functions_run_the_original() -> None:
    x = torch.randn(64, 16)
    model: Any = optimize_checkpoints(Net(), "1GB", (x,), **QUICK)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(model, parameters, (x,))

    with pytest.warns(UserWarning, match=r"transform of torch\.func"):
        gradients = torch.func.grad(loss)(parameters)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    plain(x).backward()
    assert torch.allclose(gradients["a.weight"], plain.a.weight.grad)  # type: ignore[arg-type]
    assert sum(model.remat.stats.fallbacks.values()) == 1


SCRIPT = """
import importlib.util
assert importlib.util.find_spec("torch") is not None
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(8, 16)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_look_for_torch_before_it_imports_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "remat", "run", "--budget", "1GB", "--time-limit-s", "1"]
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    assert "2 planned, 0 not" in done.stderr
