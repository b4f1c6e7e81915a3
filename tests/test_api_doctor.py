"""doctor: whether a model can be planned, where it fails, what a plan does otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_api_autograd import Sine
from test_api_errors import Branch, Plain, X
from torch import Tensor, nn
from twins import make, same

from remat.doctor import Example, doctor, examine, main

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.lin(x)).tanh()

class Branch(Net):
    def forward(self, x):
        hidden = super().forward(x)
        if hidden.sum() > 0:
            return hidden
        return -hidden

def good():
    return Net(), (torch.randn(8, 4),), {}, torch.sum

def bad():
    return Branch(), (torch.randn(8, 4),)

def bare():
    return Net()

def wrong():
    return 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_model_that_can_be_planned(factories: str) -> None:
    found = doctor(f"{factories}:good")
    assert (found.captured, found.planned, found.failure) == (True, True, "")
    assert found.ops > 5
    assert found.guards > 5
    assert 0 < found.least_peak_bytes <= found.baseline_peak_bytes
    assert str(found).startswith(f"Net can be planned: {found.ops} ops, {found.guards} guards.")
    assert "note: drop drop out at random" in str(found)


def test_a_model_that_cannot_names_the_line_and_the_way_out(factories: str) -> None:
    found = doctor(f"{factories}:bad")
    assert (found.captured, found.planned, found.ops) == (False, False, 0)
    line = FACTORY.splitlines().index("        if hidden.sum() > 0:") + 1
    assert f"{factories}.py:{line}: if hidden.sum() > 0:" in found.failure
    assert "Move such code out of the model" in str(found)


def test_without_a_call_only_the_modules_are_looked_at(factories: str) -> None:
    found = doctor(f"{factories}:bare")
    assert not found.captured
    assert "no example arguments" in str(found)
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("{}:wrong", "returned a int"),
        ("{}:absent", "has no attribute"),
        ("no_such_module:f", "No module named"),
        ("{}", "name a script"),
        ("train.py", "only module:factory"),
    ],
)
def test_what_cannot_be_examined_is_said(target: str, match: str, factories: str) -> None:
    with pytest.raises(ValueError, match=match):
        doctor(target.format(factories))


def test_a_script_is_examined_through_what_finds_its_model() -> None:
    def find(path: Path, arguments: Any) -> Example:
        assert (path, list(arguments)) == (Path("train.py"), ["--lr", "1"])
        return Example(make(Plain), (X,))

    assert doctor("train.py", ["--lr", "1"], find).planned


def test_the_command_says_it_and_exits_by_it(
    factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", f"{factories}:good"]) == 0
    assert json.loads(capsys.readouterr().out)["planned"] is True
    assert main([f"{factories}:bad"]) == 1
    assert "Branch cannot be planned." in capsys.readouterr().out
    assert main([f"{factories}:wrong"]) == 2
    assert "error: " in capsys.readouterr().err


def test_notes_name_hooks_norms_custom_functions_and_checkpointing() -> None:
    class Custom(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)
            self.block.gradient_checkpointing = True  # type: ignore[assignment]
            self.block.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return Sine.apply(self.block(super().forward(x)))  # type: ignore[no-untyped-call]

    model = make(Custom)
    model.block.register_forward_hook(lambda *args: None)  # type: ignore[union-attr]
    state = [torch.get_rng_state(), *(b.clone() for b in model.buffers())]
    with pytest.warns(UserWarning, match="block have hooks"):
        found = examine(Example(model, (X,)))
    assert same([torch.get_rng_state(), *model.buffers()], state)
    text = str(found)
    assert found.planned
    for part in (
        "block have hooks",
        "norm keep running statistics",
        "custom autograd functions Sine",
        "block checkpoint activations already",
        "block.bias are frozen",
    ):
        assert part in text
    assert len(found.notes) == 5


def test_examining_leaves_autograd_functions_alone() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    examine(Example(make(Branch), (X,)))
    assert torch.autograd.Function.__dict__["apply"] is before
