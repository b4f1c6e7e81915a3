"""verify=True: equal steps pass untouched; a difference is found, named, and eager trains on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, fx, nn
from twins import LOOSE, Step, least, make, optimized, record, same

from remat import StepProtocol, VerifyError, optimize_checkpoints
from remat.compare import differs
from remat.passes.randomness import repeat_random

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
STEP = Step((X,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        hidden = nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.4)
        return {"hidden": hidden.sin(), "y": self.last(hidden.exp()).tanh()}


NET = Step((X,), loss=lambda output: output["y"].pow(2).sum() + output["hidden"].sum())


@pytest.fixture(scope="module")
def budget() -> int:
    return least(make(Net), NET, protocol=StepProtocol(gradients_resident=True))


def verified(budget: int, **options: Any) -> Any:
    return optimized(make(Net), NET, budget, verify=True, **options)


def test_a_step_that_equals_eager_is_verified_once_and_unchanged(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = verified(budget)
    assert model.remat.plan.repetitions
    eager: list[int] = []
    forward = Net.forward

    def counted(*args: Any) -> Any:
        eager.append(1)
        return forward(*args)

    monkeypatch.setattr(Net, "forward", counted)
    seen = record(model, NET, 3)
    assert len(eager) == 1
    monkeypatch.undo()
    assert same(seen, record(make(Net), NET, 3))
    # two outputs, three buffers, a generator state, six gradients
    assert model.remat.stats.verified == "12 tensors of a step equal eager's, bit for bit"
    assert (model.remat.stats.planned, model.remat.stats.failed) == (3, "")


def test_bfloat16_autocast_frozen_parts_ties_and_inputs_with_a_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last.weight = self.first.weight
            self.first.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x).tanh()).sin().sum()

    def around() -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    x = X.clone().requires_grad_()
    step = Step((x,), loss=lambda output: output, around=around)
    model = optimized(make(Tied), step, verify=True)
    seen = record(model, step)
    gradient, x.grad = x.grad, None
    assert same(seen, record(make(Tied), step))
    assert torch.equal(x.grad, gradient)  # type: ignore[arg-type]
    assert "bit for bit" in model.remat.stats.verified


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "resnet"))]
)
def test_models_of_the_zoo_are_verified(name: str) -> None:
    case = zoo.build(name)
    options: dict[str, Any] = {"verify": True, "time_limit_s": 3.0, **LOOSE}
    plan = optimized(case.model, Step(case.args, case.kwargs), 10**12, time_limit_s=3.0).remat.plan
    model: Any = optimize_checkpoints(
        case.model, f"{plan.least_peak_bytes}B", case.args, case.kwargs, **options
    )
    case = zoo.Case(name, model, case.args, case.kwargs, case.loss_fn)
    case.loss().backward()  # type: ignore[no-untyped-call]
    assert "bit for bit" in model.remat.stats.verified
    assert model.remat.stats.planned == 1


def scale(graph: fx.GraphModule, node: fx.Node, factor: float) -> None:
    """Multiply what a node yields."""
    with graph.graph.inserting_after(node):
        wrong = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    graph.recompile()


def break_gradient(model: Any) -> None:
    """The gradient of last.weight comes out larger by a millionth."""
    program = model.remat.planned.program
    position = model.remat.entry.guard.names.index("last.weight")
    for stage, targets in zip(program.parts.stages, program.parameters, strict=True):
        if position in targets:
            results = stage.module.graph.output_node().args[0]
            scale(stage.module, results[targets.index(position)], 1 + 1e-6)


def break_output(model: Any) -> None:
    parts = model.remat.planned.parts
    results: Any = parts.forward.graph.output_node().args[0]
    scale(parts.forward, results[len(parts.mutations) + 1], 1 + 1e-6)


def break_buffer(model: Any) -> None:
    parts = model.remat.planned.parts
    results: Any = parts.forward.graph.output_node().args[0]
    scale(parts.forward, results[0], 1 + 1e-6)


@pytest.mark.parametrize(
    ("change", "where", "tensor"),
    [
        (break_gradient, "backward", r"gradient of last\.weight: \d+ of 64 elements"),
        (break_output, "forward", r"output\['y'\]: \d+ of 128 elements of float32\[16, 8\]"),
        (break_buffer, "forward", r"buffer norm\.(running|num)"),
    ],
)
def test_a_difference_is_named_and_eager_trains_on(
    change: Callable[[Any], None], where: str, tensor: str, budget: int
) -> None:
    model = verified(budget, protocol=StepProtocol(gradients_resident=True))
    change(model)
    held = torch.ones(8, 8)
    model.first.weight.grad = held
    torch.manual_seed(1)
    state = [*(b.clone() for b in model.buffers()), torch.get_rng_state()]
    with pytest.raises(VerifyError, match=tensor) as found:
        NET.loss(model(X)).backward()  # type: ignore[no-untyped-call]
    assert "test_api_verify.py:" in str(found.value)
    if where == "forward":
        assert same([*model.buffers(), torch.get_rng_state()], state)
    assert model.first.weight.grad is held
    assert torch.equal(held, torch.ones(8, 8))
    assert all(p.grad is None for p in model.parameters() if p is not model.first.weight)
    assert "differs from eager" in model.remat.stats.failed
    assert "differs from eager" in model.remat.explain()
    eager = make(Net)
    eager.load_state_dict(model.state_dict())
    model.zero_grad()
    assert same(record(model, NET), record(eager, NET))
    assert sum(model.remat.stats.fallbacks.values()) == 2


def test_a_mask_that_is_drawn_anew_in_the_recomputation_is_found() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())

    model = optimized(make(build), STEP, 10**12, recompute=("1",), verify=True)
    redrawn = 0
    for stage in model.remat.planned.parts.stages:
        for node in stage.module.graph.nodes:
            if node.target is repeat_random:
                node.target = lambda state, kept, op, *rest, **named: op(*rest, **named)
                redrawn += 1
        stage.module.recompile()
    assert redrawn == 1
    loss = STEP.loss(model(X))
    with pytest.raises(VerifyError, match=r"gradient of 2\.weight: \d+ of 64 elements"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert same(record(model, STEP), record(make(build), STEP))


def test_without_verify_the_same_break_goes_unnoticed(budget: int) -> None:
    model = optimized(make(Net), NET, budget)
    break_gradient(model)
    NET.loss(model(X)).backward()  # type: ignore[no-untyped-call]
    assert model.remat.stats.failed == ""


def test_two_forwards_a_kept_graph_and_a_partial_backward(budget: int) -> None:
    def scene(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        one, two = NET.loss(model(X)), NET.loss(model(X))
        two.backward()  # type: ignore[no-untyped-call]
        one.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        one.backward()  # type: ignore[no-untyped-call]
        rest = torch.autograd.grad(NET.loss(model(X)), [model.get_parameter("last.weight")])
        return [*rest, *(p.grad for p in model.parameters() if p.grad is not None)]

    def build() -> nn.Module:
        net = Net()
        net.norm = nn.Identity()  # type: ignore[assignment]
        return net

    model = optimized(make(build), NET, budget, verify=True)
    with pytest.warns(UserWarning, match="outstanding"):
        found = scene(model)
    assert same(found, scene(make(build)))
    assert "bit for bit" in model.remat.stats.verified


def test_a_forward_without_backward_leaves_the_next_step_to_be_verified(budget: int) -> None:
    model = verified(budget)
    model(X)
    assert model.remat.stats.verified == ""
    record(model, NET, 1)
    assert "bit for bit" in model.remat.stats.verified


def test_an_eager_run_that_fits_with_its_activations_on_the_host_is_compared(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Net.forward, []

    def once_full(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            nn.functional.dropout(args[1], 0.5)  # what it has drawn is drawn again
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(*args)

    model = verified(budget)
    monkeypatch.setattr("remat.verify._has_a_host", lambda device: True)
    monkeypatch.setattr(Net, "forward", once_full)
    seen = record(model, NET)
    monkeypatch.undo()
    assert same(seen, record(make(Net), NET))
    assert "bit for bit; eager's activations were kept on the host" in model.remat.stats.verified


def test_an_eager_run_that_does_not_fit_is_said(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = verified(budget)
    monkeypatch.setattr(Net, "forward", full)
    with pytest.warns(UserWarning, match="could not be verified"):
        seen = record(model, NET)
    monkeypatch.undo()
    assert same(seen, record(make(Net), NET))
    assert model.remat.stats.verified == "not verified: out of memory"


def test_bits_are_compared() -> None:
    nan, one = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])
    assert differs(nan, nan.clone()) == ""
    assert "1 of 2 elements" in differs(nan, one)
    assert "float64[2]" in differs(one.double(), one)
    assert "none" in differs(None, one)
    assert differs(None, None) == ""
    assert "1 of 2 elements of float32[2] differ, by up to 0.5" in differs(
        one + torch.tensor([0.0, 0.5]), one
    )
