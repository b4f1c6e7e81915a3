"""The drop-in as an object: class, state, copies, pickles, modes, hooks, switches."""

import copy
import io
import pickle
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from twins import HUGE, LOOSE, Step, least, make, optimized, record, same

from remat import UnsupportedGraphError, optimize_checkpoints


class Net(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = self.first
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Any:
        hidden = (self.tied(self.first(x).tanh()) - self.mean).sin() * scale
        if mask is not None:
            hidden = hidden * mask
        return self.last(hidden).tanh()

    def greet(self) -> str:
        return f"net of {self.first.in_features}"


STEP = Step((torch.randn(16, 8, generator=torch.Generator().manual_seed(0)),))


@pytest.fixture
def net() -> Any:
    return make(Net)


def test_the_dropin_is_of_the_users_class_and_a_graph_module(net: Any) -> None:
    model = optimized(net, STEP)
    assert isinstance(model, Net)
    assert isinstance(model, fx.GraphModule)
    assert type(model).__name__ == "Net"
    assert type(model) is type(optimized(net, STEP))
    assert repr(model) == repr(net)
    assert str(model) == str(net)
    assert model.greet() == "net of 8"
    assert [n for n, _ in model.named_modules()] == [n for n, _ in net.named_modules()]


def test_parameters_buffers_and_submodules_are_the_same_objects(net: Any) -> None:
    model = optimized(net, STEP)
    for kind in ("parameters", "buffers", "children"):
        mine, theirs = (list(getattr(m, kind)()) for m in (model, net))
        assert all(a is b for a, b in zip(mine, theirs, strict=True))
    assert list(model.state_dict()) == list(net.state_dict())
    assert model.load_state_dict(net.state_dict(), strict=True).missing_keys == []
    net.register_buffer("late", torch.zeros(1))
    assert "late" in model.state_dict()


def test_graphs_can_be_read(net: Any) -> None:
    model = optimized(net, STEP)
    assert model.remat.plan.repetitions
    text = model.remat.backward_graph.print_readable(print_output=False)
    assert "_again" in text
    assert model.graph is model.remat.forward_graph.graph
    assert "torch.ops.aten.tanh" in model.code
    assert "tanh" in model.print_readable(print_output=False)
    model.recompile()
    assert same(record(model, STEP), record(make(Net), STEP))


def test_the_graph_is_empty_where_the_original_runs(net: Any) -> None:
    model = optimized(net, STEP, HUGE)
    assert model.remat.forward_graph is None
    assert [node.op for node in model.graph.nodes] == ["output"]
    lazy: Any = optimize_checkpoints(net, "1GB")
    assert "No plan yet" in lazy.remat.explain()


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_made_before_or_after_trains_both(before: bool) -> None:
    states = []
    for plan in (False, True):
        model: Any = make(Net)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if before else None
        model = optimized(model, STEP) if plan else model
        optimizer = made or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            STEP.loss(model(*STEP.args)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        states.append(list(model.state_dict().items()))
    assert same(*states)


def test_other_modes_run_the_original_and_are_not_counted(net: Any) -> None:
    model = optimized(net, STEP)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert model(x).grad_fn is None
    with torch.inference_mode():
        assert model(x).is_inference()
    model.eval()
    assert same(model(x), make(Net).eval()(x))
    assert not net.first.training
    stats = model.remat.stats
    assert (stats.planned, dict(stats.fallbacks)) == (0, {})
    assert model.train() is model
    model(*STEP.args)
    assert stats.planned == 1


def test_disable_and_enable(net: Any) -> None:
    model = optimized(net, STEP)
    model.remat.disable()
    model(*STEP.args)
    assert model.remat.stats.planned == 0
    model.remat.enable()
    model(*STEP.args)
    assert model.remat.stats.planned == 1


def test_a_deep_copy_shares_nothing_and_plans_for_itself(net: Any) -> None:
    model = optimized(net, STEP)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.remat is not model.remat
    assert twin.last.weight is twin.first.weight is not model.first.weight
    assert same(record(twin, STEP), record(model, STEP))
    assert twin.remat.stats.planned == 2


def test_a_shallow_copy_shares_the_state(net: Any) -> None:
    model = optimized(net, STEP)
    twin = copy.copy(model)
    assert twin.first is model.first
    assert same(record(twin, STEP, 1), record(make(Net), STEP, 1))


class Streaming(nn.Module):
    """Holds what can neither be copied nor pickled, and says so as classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.stream = (number for number in range(3))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.stream = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Shape as before."""
        y: Tensor = self.second(self.first(x).tanh())
        return y


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_class_that_says_how_it_is_copied_is_copied_so(copied: Any) -> None:
    step = Step((torch.ones(4, 8),))
    model = optimized(make(Streaming), step, HUGE)
    model.first.owner = [model]
    twin = copied(model)
    assert next(twin.stream) == 0
    assert isinstance(twin, Streaming)
    assert vars(twin.first)["owner"][0] is twin
    assert twin.first.weight is not model.first.weight
    assert same(record(twin, step, 1), record(make(Streaming), step, 1))


LOAD = """
import sys
sys.modules["remat"] = None
import pickle, torch
for model in (torch.load(sys.argv[1], weights_only=False), pickle.load(open(sys.argv[2], "rb"))):
    assert type(model) is torch.nn.Sequential, type(model)
    assert "remat" not in vars(model)
    print(model(torch.ones(1, 8)).sum().item())
"""


def test_a_pickle_loads_as_the_users_class_without_remat(tmp_path: Any) -> None:
    net = make(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    model = optimized(net, STEP)
    files = [tmp_path / "saved", tmp_path / "pickled"]
    torch.save(model, files[0])
    files[1].write_bytes(pickle.dumps(model))
    command = [sys.executable, "-c", LOAD, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = net(torch.ones(1, 8)).sum().item()
    assert [float(line) for line in done.stdout.split()] == [expected, expected]


def test_a_saved_state_dict_loads_into_the_plain_model(net: Any) -> None:
    file = io.BytesIO()
    torch.save(optimized(net, STEP).state_dict(), file)
    file.seek(0)
    assert Net().load_state_dict(torch.load(file)).missing_keys == []


@pytest.mark.parametrize("name", ["graph", "code", "meta", "remat"])
def test_a_clash_of_attributes_is_refused(net: Any, name: str) -> None:
    setattr(net, name, 3)
    with pytest.raises(UnsupportedGraphError, match=name):
        optimize_checkpoints(net, 1)


def test_optimising_twice_plans_anew_from_the_original(net: Any) -> None:
    first = optimized(net, STEP)
    second = optimized(first, STEP, HUGE)
    assert type(second) is type(first)
    assert second.remat is not first.remat
    assert second.remat.plan.is_eager
    assert not first.remat.plan.is_eager
    expected = record(make(Net), STEP, 1)
    assert same(record(second, STEP, 1), expected)
    assert first.remat.stats.planned == 0


def test_a_forward_that_was_put_on_the_instance_is_planned_and_copied(net: Any) -> None:
    def twice(self: Net, x: Tensor) -> Any:
        return Net.forward(self, x).sin()

    net.forward = MethodType(twice, net)
    expected = record(copy.deepcopy(net), STEP)
    model = optimized(net, STEP)
    assert not model.remat.plan.is_eager
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert same(record(each, STEP), expected)
        assert each.remat.stats.planned == 2
    assert twin.first is not model.first


def test_root_hooks_fire_once_for_a_call(net: Any) -> None:
    fired: list[str] = []
    net.register_forward_pre_hook(lambda module, args: fired.append("before"))
    net.register_forward_hook(lambda module, args, output: fired.append("after"))
    net.register_full_backward_hook(lambda module, given, got: fired.append("backward"))
    (x,) = STEP.args
    step = Step((x.clone().requires_grad_(),))
    fired.clear()
    model = optimized(net, step)
    assert fired == []
    STEP.loss(model(*step.args)).backward()  # type: ignore[no-untyped-call]
    assert fired == ["before", "after", "backward"]
    assert model.remat.stats.planned == 1


def test_a_submodule_hook_that_changes_the_output_is_part_of_the_plan(net: Any) -> None:
    def build() -> nn.Module:
        made = Net()
        made.first.register_forward_hook(lambda module, args, output: output * 2)
        return made

    with pytest.warns(UserWarning, match="first, tied have hooks|first have hooks"):
        model = optimized(make(build), STEP)
    assert same(record(model, STEP), record(make(build), STEP))


def test_a_submodule_hook_that_is_added_later_is_a_counted_fallback(net: Any) -> None:
    model = optimized(net, STEP)
    seen: list[Tensor] = []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.warns(UserWarning, match="hooks of a submodule have been added"):
        model(*STEP.args)
    assert len(seen) == 2


def test_dropins_work_on_modules_that_are_used_alone(net: Any) -> None:
    """A submodule of a drop-in is the plain submodule."""
    model = optimized(net, STEP)
    assert type(model.first) is nn.Linear
    assert model.first(STEP.args[0]).requires_grad


def test_planning_lazily_needs_no_example(net: Any) -> None:
    budget = least(net, STEP)
    model: Any = optimize_checkpoints(net, f"{budget}B", **LOOSE)
    assert model.remat.forward_graph is None
    assert same(record(model, STEP), record(make(Net), STEP))
    assert model.remat.stats.plans == 1
    assert model.remat.plan.repetitions
