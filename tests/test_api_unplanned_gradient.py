"""A gradient of an output that the plan was not made for: that step by eager, the next by another plan."""

import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launch import LAUNCH, start
from torch import Tensor, nn
from twins import LOOSE, Step, make, record, same

from remat import GuardError, InfeasibleBudgetError, StepProtocol, optimize_checkpoints

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 8
REASON = "output tensor 1 receives a gradient, unlike when it was planned"
QUICK: dict[str, Any] = {**LOOSE, "time_limit_s": 1.0, "recompute": ("::aten.tanh*",)}

pytestmark = pytest.mark.filterwarnings(
    "ignore:remat. output tensor", "ignore:remat. made another plan"
)


@dataclass
class Output:
    """What models return that compute their loss themselves."""

    loss: Tensor
    logits: Tensor
    hidden: Tensor | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.3)
        logits = self.last(hidden)
        return Output(nn.functional.cross_entropy(logits, labels), logits, hidden)


def distilled(output: Any) -> Tensor:
    """A loss of the script's own, beside the model's."""
    loss: Tensor = output.loss + output.logits.log_softmax(-1).square().mean()
    return loss


STEP = Step((X, Y), loss=distilled)


def planned(build: Callable[[], nn.Module] = Net, *args: Any, **options: Any) -> Any:
    """A drop-in whose budget anything fits, and that is planned all the same."""
    return optimize_checkpoints(make(build), "1GB", args, **{**QUICK, **options})


def back(loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def state(model: nn.Module) -> list[Any]:
    return [*gradients(model), *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def counts(model: Any) -> tuple[int, int, dict[str, int]]:
    stats = model.remat.stats
    assert not stats.fallbacks
    assert model.remat.outstanding == 0
    return stats.planned, stats.plans, dict(stats.replanned)


@pytest.mark.parametrize("example", [(), (X, Y)], ids=["lazy", "example"])
def test_training_goes_on_as_in_eager_and_the_next_call_is_planned_for_it(
    example: tuple[Tensor, ...],
) -> None:
    expected = record(make(Net), STEP, 4)
    model = planned(Net, *example)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(record(model, STEP, 4), expected)
    assert counts(model) == (4, 2, {REASON: 1})
    (warning,) = caught
    assert "output tensor 1 receives a gradient, which the plan was not made" in str(
        warning.message
    )
    assert model.remat.planned.program.gradient_results == (0, 1)
    assert f"another plan: {REASON}" in model.remat.explain()


def test_the_warning_names_the_line_that_calls_backward() -> None:
    model = planned()
    with pytest.warns(UserWarning, match="without the memory cap") as caught:
        back(model(X, Y).logits.sum())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back(distilled(model(X, Y)))


def test_a_gradient_through_that_output_alone() -> None:
    step = Step((X, Y), loss=lambda output: output.logits.square().sum())
    model = planned()
    assert same(record(model, step, 3), record(make(Net), step, 3))
    assert counts(model) == (3, 2, {REASON: 1})


def trained(model: nn.Module, scene: Callable[[nn.Module, int], None], steps: int) -> list[Any]:
    """Steps of a scene that each call backward, and what they leave."""
    torch.manual_seed(1)
    seen: list[Any] = []
    for number in range(steps):
        scene(model, number)
        seen += state(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
    return seen


def alike(
    scene: Callable[[nn.Module, int], None], steps: int = 3, build: Callable[[], nn.Module] = Net
) -> Any:
    """The drop-in, after a scene that plays out as in eager."""
    model = planned(build)
    assert same(trained(model, scene, steps), trained(make(build), scene, steps))
    return model


class Moving(Net):
    """Reads the buffers that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        output = super().forward(x - self.mean, labels)
        assert self.norm.running_mean is not None
        logits = output.logits * (1 + self.norm.running_mean)
        return Output(output.loss, logits, output.hidden)


def test_buffers_that_are_read_and_updated() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        back(distilled(model(X, Y)))

    assert counts(alike(scene, 3, Moving)) == (3, 2, {REASON: 1})


def test_only_buffers_that_are_read_are_remembered() -> None:
    read = {}
    for build in (Net, Moving):
        model = planned(build, X, Y)
        names = model.remat.entry.guard.names
        read[build] = {names[i] for i in model.remat.planned.program.spare.read}
    assert read[Net] == set()
    assert read[Moving] == {"mean", "norm.running_mean", "norm.running_var"}


def test_an_output_that_is_used_from_the_third_step_on_and_not_always() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        output = model(X, Y)
        back(distilled(output) if number in (2, 4) else output.loss)

    assert counts(alike(scene, 6)) == (6, 2, {REASON: 1})


def test_one_output_after_another() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        output = model(X, Y)
        back(distilled(output) + (output.hidden.sum() if number else 0))

    other = "output tensor 2 receives a gradient, unlike when it was planned"
    assert counts(alike(scene, 4)) == (4, 3, {REASON: 1, other: 1})


def test_accumulated_gradients() -> None:
    def scene(model: nn.Module, number: int) -> None:
        if number % 2 == 0:
            model.zero_grad()
        back(distilled(model(X, Y)) / 2)

    assert counts(alike(scene, 6)) == (6, 2, {REASON: 1})


def test_two_backwards_of_one_forward() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        output = model(X, Y)
        back(output.loss, retain_graph=True)
        back(output.logits.square().mean(), retain_graph=number == 0)
        if number == 0:
            back(output.loss, retain_graph=True)
            back(distilled(output))

    assert counts(alike(scene)) == (3, 2, {REASON: 1})


def test_a_second_backward_without_the_graph_raises() -> None:
    model = planned()
    output = model(X, Y)
    back(output.logits.sum())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        back(output.logits.square().sum())


def test_two_forwards_that_are_outstanding_at_once() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        first, second = model(X, Y), model(2 * X, Y)
        back(distilled(first))
        back(distilled(second))

    protocol = StepProtocol(forwards_outstanding=2)
    model = planned(protocol=protocol)
    assert same(trained(model, scene, 2), trained(make(Net), scene, 2))
    assert counts(model) == (4, 2, {REASON: 1})


def test_under_autocast_with_backward_outside_of_it() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(X, Y)
        assert output.logits.dtype == torch.bfloat16
        back(distilled(output))

    assert counts(alike(scene)) == (3, 2, {REASON: 1})


def test_the_gradient_of_an_argument() -> None:
    x = X.clone().requires_grad_()
    seen: list[Any] = []

    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        back(distilled(model(x * 2, Y)))
        seen.append(x.grad)
        x.grad = None

    assert counts(alike(scene)) == (3, 2, {REASON: 1})
    assert same(seen[:3], seen[3:])


def test_hooks_of_parameters_fire_once_and_gradients_are_replaced_by_what_they_return() -> None:
    fired: list[str] = []

    def hooked(name: str, parameter: Any) -> None:
        def halved(gradient: Tensor) -> Tensor:
            fired.append(name)
            return gradient / 2

        parameter.register_hook(halved)
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(f"{name} is there"))

    def scene(model: nn.Module, number: int) -> None:
        if number == 0:
            for name, parameter in model.named_parameters():
                hooked(name, parameter)
        model.zero_grad()
        back(distilled(model(X, Y)))

    alike(scene, 2)
    names = [name for name, _ in Net().named_parameters()]
    expected = sorted([*names, *(f"{name} is there" for name in names)])
    each = len(expected)
    assert [sorted(fired[i : i + each]) for i in range(0, len(fired), each)] == [expected] * 4


class Heads(Net):
    """Parameters on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(8, 3), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        output = super().forward(x, labels)
        assert output.hidden is not None
        return Output(output.loss, self.head(output.hidden).sin(), output.hidden)


def test_parameters_that_only_this_output_depends_on() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        output = model(X, Y)
        back(output.loss if number == 0 else distilled(output))

    model = alike(scene, 4, Heads)
    assert counts(model) == (4, 2, {REASON: 1})
    assert model.unused.grad is None


def test_their_hooks_do_not_fire_where_that_output_is_not_used() -> None:
    model = planned(Heads)
    fired: list[Any] = []
    for parameter in (model.head.weight, model.unused):
        parameter.register_hook(fired.append)
    back(model(X, Y).loss)
    assert not fired
    back(distilled(model(X, Y)))
    assert [gradient.shape for gradient in fired] == [(3, 8)]


def test_a_backward_that_has_failed_half_way_leaves_nothing_to_the_next_one() -> None:
    def failing(gradient: Tensor) -> None:
        raise KeyError("hook")

    found = []
    for model in (make(Heads), planned(Heads)):
        torch.manual_seed(1)
        output = model(X, Y)
        for name in ("head.weight", "first.weight"):
            weight: Any = model.get_parameter(name)
            hook = weight.register_hook(failing)
            with pytest.raises(KeyError, match="hook"):
                back(distilled(output), retain_graph=True)
            hook.remove()
        model.zero_grad()
        back(output.loss)
        found.append(gradients(model))
    assert same(*found)


@pytest.mark.parametrize("names", [["head.bias"], ["first.weight"], ["head.bias", "last.bias"]])
def test_a_partial_backward_leaves_the_others_alone(names: list[str]) -> None:
    found: list[Any] = []
    for model in (make(Heads), planned(Heads)):
        torch.manual_seed(1)
        some = [model.get_parameter(name) for name in names]
        found.append(torch.autograd.grad(distilled(model(X, Y)), some))
        assert all(p.grad is None for p in model.parameters())
        back(distilled(model(X, Y)), inputs=some)
        found.append([p.grad for p in some])
        assert sum(p.grad is not None for p in model.parameters()) == len(some)
    assert same(found[:2], found[2:])


def test_outputs_that_the_user_has_named_are_the_only_ones() -> None:
    model = planned(protocol=StepProtocol(gradient_outputs=(0,)))
    with pytest.raises(
        GuardError, match=r'gradients of \[0\] only\. Pass .*gradient_outputs="all"'
    ):
        back(distilled(model(X, Y)))
    assert counts(model) == (1, 1, {})


class Counting(Net):
    """Changes an argument."""

    def forward(self, x: Tensor, labels: Tensor, seen: Tensor) -> Output:  # type: ignore[override]
        seen.add_(1)
        return super().forward(x, labels)


def test_a_step_that_updates_an_argument_is_not_run_again() -> None:
    model = planned(Counting)
    with pytest.raises(GuardError, match=r"only\. Pass"):
        back(distilled(model(X, Y, torch.zeros(1))))


def change_bias(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter("last.bias").add_(1)


def change_argument(model: nn.Module, x: Tensor) -> None:
    x.add_(1)


def replace_bias(model: nn.Module, x: Tensor) -> None:
    model.get_submodule("last").bias = nn.Parameter(torch.ones(8))


CHANGES: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "parameter": (change_bias, "last.bias has been changed in place"),
    "argument": (change_argument, "modified by an inplace operation"),
    "replaced": (replace_bias, "last.bias has been replaced"),
    "mode": (lambda model, x: model.norm.eval(), "since its forward, norm.training is False"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_has_changed_since_its_forward_is_not_run_again(what: str) -> None:
    change, match = CHANGES[what]
    model, x = planned(), X.clone()
    output = model(x, Y)
    change(model, x)
    with pytest.raises((GuardError, RuntimeError), match=match):
        back(distilled(output))
    assert all(p.grad is None for p in model.parameters())


def test_a_changed_parameter_that_backward_needs_raises_as_in_eager() -> None:
    for model in (make(Net), planned()):
        output = model(X, Y)
        with torch.no_grad():
            model.get_parameter("last.weight").add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            back(distilled(output))


def test_a_drop_in_that_is_gone_is_not_kept_alive_for_it() -> None:
    model = planned()
    remat, alive = weakref.ref(model.remat), weakref.ref(model)
    output = model(X, Y)
    del model
    gc.collect()
    assert alive() is None
    assert remat() is None
    with pytest.raises(GuardError, match="the model is gone"):
        back(distilled(output))


@pytest.mark.parametrize("error", [KeyError("user"), torch.OutOfMemoryError("no memory")])
def test_what_the_forward_raises_is_raised_and_the_next_step_is_fine(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> None:
        raise error

    model = planned()
    output = model(X, Y)
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", failing)
        with pytest.raises(type(error), match=str(error.args[0])):
            back(distilled(output))
    assert model.remat.outstanding == 0
    assert all(p.grad is None for p in model.parameters())
    assert same(record(model, STEP, 2), record_after_a_forward(2))
    assert counts(model) == (3, 2, {REASON: 1})


def record_after_a_forward(steps: int) -> list[Any]:
    """Eager, if its first backward has failed."""
    model = make(Net)
    model(X, Y)
    return record(model, STEP, steps)


class Shifted(Heads):
    """Has an argument that backward does not need."""

    def forward(self, x: Tensor, labels: Tensor, shift: Tensor) -> Output:  # type: ignore[override]
        return super().forward(x + shift, labels)


def left_by(model: Any, loss_of: Callable[[Any], Tensor]) -> list[Any]:
    """What of a step is there after its backward, without the garbage collector."""
    x = X.clone()
    model.zero_grad()
    output = model(x, Y)
    alive = [weakref.ref(t) for t in (x, output.loss, output.logits, output.hidden)]
    back(loss_of(output))
    del x, output
    return [tensor for ref in alive if (tensor := ref()) is not None]


@pytest.mark.parametrize("build", [Net, Heads])
def test_nothing_is_held_after_the_step(build: Callable[[], nn.Module]) -> None:
    model = planned(build)
    model(X, Y)  # a plan keeps the call that it was made for
    gc.collect()
    gc.disable()
    try:
        assert left_by(model, lambda output: output.loss) == []
        assert left_by(model, distilled) == []
        model.zero_grad()
        model(X, Y)
        assert left_by(model, distilled) == []
    finally:
        gc.enable()
    assert counts(model) == (5, 2, {REASON: 1})


def test_an_argument_that_gets_a_history_in_an_output_does_not_keep_it_alive() -> None:
    model = planned(Shifted)
    model(X, Y, torch.zeros(8))
    shift = torch.zeros(8)
    gc.collect()
    gc.disable()
    try:
        output = model(X, Y, shift)
        shift.add_(output.logits.sum())
        alive = [weakref.ref(t) for t in (shift, output.loss, output.logits)]
        del shift, output
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
    assert model.remat.outstanding == 0


def test_such_a_step_is_not_verified_and_the_next_one_is() -> None:
    verified: list[str] = []

    def scene(model: Any, number: int) -> None:
        model.zero_grad()
        back(distilled(model(X, Y)))
        if hasattr(model, "remat"):
            verified.append(model.remat.stats.verified)

    model = planned(verify=True)
    assert same(trained(model, scene, 3), trained(make(Net), scene, 3))
    assert verified[0] == ""
    assert "bit for bit" in verified[1]
    assert counts(model) == (3, 2, {REASON: 1})


def test_a_short_batch_is_planned_for_it_from_the_start() -> None:
    def scene(model: nn.Module, number: int) -> None:
        model.zero_grad()
        rows = 16 if number < 2 else 8
        back(distilled(model(X[:rows], Y[:rows])))

    model = alike(scene, 4)
    planned, plans, replanned = counts(model)
    assert (planned, plans, replanned[REASON]) == (4, 3, 1)


def test_a_budget_that_the_wider_plan_does_not_fit_is_an_error() -> None:
    narrow = planned(Net, X, Y).remat.plan.least_peak_bytes
    wide = planned(Net, X, Y, protocol=StepProtocol(gradient_outputs="all")).remat.plan
    assert wide.least_peak_bytes > narrow
    model: Any = optimize_checkpoints(make(Net), f"{narrow}B", (X, Y), **QUICK)
    back(distilled(model(X, Y)))
    with pytest.raises(InfeasibleBudgetError):
        model(X, Y)


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(16, 8)

    def forward(self, x, labels):
        logits = self.last(nn.functional.dropout(self.layers(x), 0.2))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
x, labels, teacher = torch.randn(64, 16), torch.arange(64) % 8, torch.randn(64, 8).softmax(-1)
for step in range(8):
    output = model(x, labels)
    loss = output["loss"] + nn.functional.cross_entropy(output["logits"], teacher)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.9f}")
"""


def test_a_launched_script_that_uses_the_logits_beside_the_loss_prints_what_it_prints(
    tmp_path: Path,
) -> None:
    script = tmp_path / "distil.py"
    script.write_text(SCRIPT)
    plain = start(sys.executable, script)
    budget = ("--budget", "45kB", "--time-limit-s", 1)
    launched = start(*LAUNCH, *budget, "--measure", script)
    assert plain.code == launched.code == 0, launched.err
    assert launched.out == plain.out
    assert len(plain.out.splitlines()) == 8
    assert launched.calls == (8, 0)
    assert "time predicted" in launched.ours  # not eager's own step
    assert "2 plans made" in launched.ours
    assert launched.err.count("which the plan was not made for") == 1
    assert launched.bytes("measured") <= launched.bytes("budget"), launched.ours
