"""Which calls run the plan: arguments, outputs, guards, fallbacks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from test_api_dropin import STEP, Net
from torch import Tensor, nn
from transformers.utils import ModelOutput
from twins import LOOSE, Step, least, make, optimized, record, same, trained_alike

from remat import StepProtocol, UnsupportedGraphError, optimize_checkpoints


@pytest.fixture
def net() -> Any:
    return make(Net)


def test_positional_keyword_and_default_arguments_hit_one_plan(net: Any) -> None:
    model = optimized(net, STEP)
    (x,) = STEP.args
    calls: list[Any] = [
        ((x,), {}),
        ((), {"x": x}),
        ((x, 1.0), {}),
        ((x,), {"scale": 1.0, "mask": None}),
    ]
    results = [model(*args, **kwargs).detach() for args, kwargs in calls]
    assert model.remat.stats.planned == 4
    assert all(torch.equal(result, results[0]) for result in results)


def test_other_values_fall_back_with_a_reason_and_one_warning(net: Any) -> None:
    model = optimized(net, STEP)
    (x,) = STEP.args
    plain = make(Net)
    with pytest.warns(UserWarning, match="without the memory cap") as caught:
        assert torch.equal(model(x, 2.0), plain(x, 2.0))
    assert torch.equal(model(x, mask=x > 0), plain(x, mask=x > 0))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "No call has run the plan" in str(caught[0].message)
    stats = model.remat.stats
    assert list(stats.fallbacks.values()) == [2]
    assert "values of arguments that are no tensors" in " ".join(stats.fallbacks)
    model(x)
    assert stats.planned == 1


@pytest.mark.parametrize("change", ["delete", "number"])
def test_a_changed_model_falls_back(net: Any, change: str) -> None:
    net.first.scale = 0.5
    model = optimized(net, STEP)
    if change == "number":
        model.first.scale = 0.25
    elif change == "delete":
        model.last.bias = None
    with pytest.warns(UserWarning, match="without the memory cap"):
        output = model(*STEP.args)
    output.sum().backward()
    assert sum(model.remat.stats.fallbacks.values()) == 1
    assert model.first.weight.grad is not None


def test_calls_that_the_signature_refuses_raise_as_in_eager(net: Any) -> None:
    model = optimized(net, STEP)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(*STEP.args, colour=1)


@dataclass
class Pair:
    loss: Tensor
    logits: Tensor
    name: str = "pair"


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclass
class Output(ModelOutput):  # type: ignore[misc]
    loss: Tensor | None = None
    logits: Tensor | None = None


class Shaped(nn.Module):
    """Returns its loss and logits in some container."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.body, self.container = nn.Linear(8, 8), container

    def forward(self, x: Any, extra: Any = None) -> Any:
        hidden = self.body(x["x"] if isinstance(x, dict) else x).tanh().sin()
        if extra is not None:
            hidden = hidden * extra.logits
        return self.container(hidden.pow(2).sum(), hidden)


CONTAINERS: dict[str, Any] = {
    "dataclass": Pair,
    "named tuple": Named,
    "model output": Output,
    "tuple": lambda loss, logits: (loss, None, {"deep": [logits, 3]}),
    "dict": lambda loss, logits: {"loss": loss, "name": "dict", "logits": logits},
}


def first_tensor(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


@pytest.mark.parametrize("name", CONTAINERS)
def test_outputs_keep_their_type(name: str) -> None:
    loss = (lambda output: output.loss) if name == "dataclass" else first_tensor
    step = Step((torch.randn(16, 8),), loss=loss)

    def build() -> nn.Module:
        return Shaped(CONTAINERS[name])

    model, plain = optimized(make(build), step), make(build)
    assert same(record(model, step), record(plain, step))
    mine, theirs = model(*step.args), plain(*step.args)
    assert type(mine) is type(theirs)
    assert repr(mine).split("grad_fn")[0] == repr(theirs).split("grad_fn")[0]


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_arguments_may_be_nested(kind: str) -> None:
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    arguments = ({"x": x, "unused": 3},) if kind == "dict" else (x, Pair(torch.zeros(()), y))
    step = Step(arguments, loss=lambda output: output[0])
    trained_alike(lambda: Shaped(lambda a, b: (a, b)), step, count=1)


class Two(nn.Module):
    """Two heads on one trunk, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Any, Any]:
        hidden = self.trunk(x).tanh()
        return self.a(hidden).tanh(), self.b(hidden).sin()


# pytorch#58511
@pytest.mark.parametrize("head", [0, 1])
def test_parameters_of_a_head_without_a_loss_have_no_gradient(head: int) -> None:
    step = Step((torch.randn(16, 8),), loss=lambda output: output[head].pow(2).sum())
    trained_alike(Two, step)
    model = optimized(make(Two), step)
    step.loss(model(*step.args)).backward()  # type: ignore[no-untyped-call]
    assert ((model.a.weight.grad is None), (model.b.weight.grad is None)) == (head == 1, head == 0)
    assert model.unused.grad is None


def test_all_outputs_may_be_planned_for_a_gradient() -> None:
    def build() -> nn.Module:
        return Shaped(lambda a, b: (a, b))

    every = StepProtocol(gradient_outputs="all")
    step = Step((torch.randn(16, 8),), loss=lambda output: output[0] + output[1].sum())
    model = optimized(make(build), step, protocol=every)
    assert same(record(model, step), record(make(build), step))
    assert model.remat.stats.plans == 1


class Tied(nn.Module):
    def __init__(self, uses: int) -> None:
        super().__init__()
        self.w, self.uses = nn.Parameter(torch.randn(8, 8) / 3), uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = (x @ self.w).tanh()
        return x


@pytest.mark.parametrize("uses", [2, 3])
def test_a_weight_with_several_uses(uses: int) -> None:
    trained_alike(lambda: Tied(uses), STEP)


def test_a_parameter_under_two_names() -> None:
    trained_alike(Net, STEP)


OUTPUTS: dict[str, Callable[[Tensor, Tensor, nn.Linear], Any]] = {
    "input": lambda x, y, lin: x,
    "view of an input": lambda x, y, lin: x.t(),
    "parameter": lambda x, y, lin: lin.weight,
    "view of an output": lambda x, y, lin: y[0],
    "twice": lambda x, y, lin: y,
    "detached": lambda x, y, lin: y.detach(),
    "integers": lambda x, y, lin: y.argmax(1),
    "constant": lambda x, y, lin: torch.arange(3),
}


class Returns(nn.Module):
    """Returns something besides its work."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(8, 8), what

    def forward(self, x: Tensor) -> Any:
        y = self.lin(x).tanh()
        return y, OUTPUTS[self.what](x, y, self.lin)


REFUSED = ("parameter", "view of an output")


@pytest.mark.parametrize("what", REFUSED)
def test_outputs_with_a_gradient_that_share_memory_are_refused(what: str) -> None:
    with pytest.raises(UnsupportedGraphError, match="Return copies instead"):
        optimized(make(lambda: Returns(what)), STEP)


@pytest.mark.parametrize("what", [what for what in OUTPUTS if what not in REFUSED])
def test_outputs_that_share_memory_are_as_in_eager(what: str) -> None:
    step = Step(STEP.args, loss=lambda output: output[0].pow(2).sum())
    plain = make(lambda: Returns(what))
    model = optimized(make(lambda: Returns(what)), step)
    assert same(record(model, step), record(plain, step))
    mine, theirs = model(*step.args), plain(*step.args)
    assert same(list(mine), list(theirs))
    assert mine[1].requires_grad == theirs[1].requires_grad
    assert (mine[0] is mine[1]) == (what == "twice")
    assert (mine[1] is step.args[0]) == (what == "input")
    assert (mine[1].data_ptr() == mine[0].data_ptr()) == (
        theirs[1].data_ptr() == theirs[0].data_ptr()
    )


def test_the_same_tensor_given_twice() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return (self.lin(a) * b).tanh().sin()

    x = torch.randn(16, 8, requires_grad=True)
    step = Step((x, x))
    model = optimized(make(Product), step)
    gradients = []
    for each in (make(Product), model):
        gradients.append(torch.autograd.grad(step.loss(each(x, x)), [x, *each.parameters()]))
    assert same(*gradients)
    with pytest.warns(UserWarning, match="without the memory cap"):
        model(x, x.clone())


def test_non_tensor_arguments_take_part_in_the_guard() -> None:
    class Options(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, mode: str, *rest: int, flag: bool = False, **kw: Any) -> Any:
            y = self.lin(x)
            y = y.tanh() if mode == "tanh" else y.sin()
            return (y * sum(rest)).tanh() + (1 if flag else 0) + kw.get("shift", 0)

    step = Step((STEP.args[0], "tanh", 1, 2), {"shift": 0.5})
    trained_alike(Options, step, count=1)
    model = optimized(make(Options), step)
    (x,) = STEP.args
    others: list[Any] = [
        ((x, "sin", 1, 2), {"shift": 0.5}),
        ((x, "tanh", 1, 3), {"shift": 0.5}),
        ((x, "tanh", 1, 2), {"shift": 0.25}),
        ((x, "tanh", 1, 2), {"shift": 0.5, "flag": True}),
    ]
    plain = make(Options)
    with pytest.warns(UserWarning, match="without the memory cap"):
        results = [(model(*args, **kw), plain(*args, **kw)) for args, kw in others]
    assert all(torch.equal(mine, theirs) for mine, theirs in results)
    assert sum(model.remat.stats.fallbacks.values()) == 4
    assert model.remat.stats.planned == 0


def test_a_loss_outside_the_model_counts_when_it_is_given(net: Any) -> None:
    def heavy(output: Tensor) -> Tensor:
        return output.repeat(20, 1).exp().sin().sum()

    plans = [optimized(net, STEP, 10**12, loss_fn=fn).remat.plan for fn in (None, heavy)]
    assert plans[0].baseline_peak_bytes < plans[1].baseline_peak_bytes
    assert [plan.loss for plan in plans] == ["outside, not counted", "traced with the model"]
    step = Step(STEP.args, loss=heavy)
    trained_alike(Net, step, loss_fn=heavy, count=1)


def test_a_model_that_is_planned_lazily_with_gradients_counts_them(net: Any) -> None:
    budget = least(net, STEP, protocol=StepProtocol(gradients_resident=True))
    model: Any = optimize_checkpoints(net, f"{budget}B", **LOOSE)
    net(*STEP.args).sum().backward()
    model(*STEP.args).sum().backward()
    assert model.remat.plan.protocol.gradients_resident
