"""The promises of autograd: several backwards, changed tensors, hooks, memory between and after."""

import contextlib
import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_api_dropin import STEP, Net
from torch import Tensor, nn
from twins import Step, least, make, optimized, record, same, trained_alike

from remat import StepProtocol, measure_peak

Outcome = list[Any]


def both(
    build: Callable[[], nn.Module], scene: Callable[[nn.Module], Any], **options: Any
) -> None:
    """A scene plays out the same with eager and with the drop-in: same values or the same error."""
    outcomes: list[Any] = []
    for plan in (False, True):
        model = make(build)
        model = optimized(model, STEP, **options) if plan else model
        try:
            outcomes.append(scene(model))
        except RuntimeError as error:
            outcomes.append((RuntimeError, str(error).split(":")[0].split(".")[0]))
    assert same(*outcomes), outcomes


def deep() -> nn.Module:
    layers = [(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def loss_of(model: nn.Module, x: Tensor = STEP.args[0]) -> Tensor:
    loss: Tensor = model(x).pow(2).sum()
    return loss


def back(loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


def test_retained_graphs_run_backward_several_times() -> None:
    def scene(model: nn.Module) -> Outcome:
        torch.manual_seed(0)
        loss = loss_of(model)
        seen = []
        for keep in (True, True, False):
            back(loss, retain_graph=keep)
            seen += gradients(model)
        return seen

    both(deep, scene)


def test_a_second_backward_without_the_graph_raises() -> None:
    def scene(model: nn.Module) -> None:
        loss = loss_of(model)
        back(loss)
        back(loss)

    both(deep, scene)


def test_double_backward_raises_clearly() -> None:
    model = optimized(make(deep), STEP)
    weights = list(model.parameters())
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(loss_of(model), weights, create_graph=True)
    assert not model.remat.outstanding
    back(loss_of(model))  # the next step is fine
    model.remat.disable()
    found = torch.autograd.grad(loss_of(model), weights, create_graph=True)
    back(found[0].pow(2).sum())


def test_two_forwards_then_two_backwards() -> None:
    other = torch.randn(16, 8)

    def scene(model: nn.Module) -> Outcome:
        torch.manual_seed(0)
        first, second = loss_of(model), loss_of(model, other)
        back(first)
        back(second)
        return [*gradients(model), torch.get_rng_state()]

    both(deep, scene, protocol=StepProtocol(forwards_outstanding=2))


def test_two_forwards_then_one_backward() -> None:
    def scene(model: nn.Module) -> Outcome:
        torch.manual_seed(0)
        back(loss_of(model) + loss_of(model))
        return gradients(model)

    both(deep, scene, protocol=StepProtocol(forwards_outstanding=2))


def test_more_outstanding_forwards_than_planned_are_reported_once() -> None:
    model = optimized(make(deep), STEP)
    first = loss_of(model)
    with pytest.warns(UserWarning, match="2 forwards are outstanding") as caught:
        second = loss_of(model)
    assert caught[0].filename == __file__
    third = loss_of(model)
    del first, second, third
    gc.collect()
    assert model.remat.outstanding == 0


def test_gradients_of_some_parameters() -> None:
    def scene(model: nn.Module) -> Outcome:
        torch.manual_seed(0)
        weights = list(model.parameters())
        loss = loss_of(model)
        last = torch.autograd.grad(loss, weights[-2:], retain_graph=True)
        return [*last, *torch.autograd.grad(loss, weights), *gradients(model)]

    both(deep, scene)


def test_an_input_that_needs_a_gradient_gets_it() -> None:
    x = torch.randn(16, 8, requires_grad=True)
    step = Step((x,))
    seen = []
    for model in (make(deep), optimized(make(deep), step)):
        torch.manual_seed(0)
        hidden = x * 2
        seen.append(torch.autograd.grad(loss_of(model, hidden), [x, *model.parameters()]))
    assert same(*seen)


CHANGES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a parameter": lambda model, x, y: model[3].weight.detach().add_(1),
    "the input": lambda model, x, y: x.add_(1),
    "the output": lambda model, x, y: y.detach().add_(1),
    "the last bias": lambda model, x, y: model[9].bias.detach().add_(1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_between_forward_and_backward(what: str) -> None:
    def scene(model: Any) -> Outcome:
        x = STEP.args[0].clone()
        output = model(x)
        loss = output.pow(2).sum()
        CHANGES[what](model, x, output)
        back(loss)
        return gradients(model)

    both(lambda: nn.Sequential(*list(deep())[:10]), scene)  # type: ignore[call-overload]


def test_an_output_that_backward_needs_must_not_be_changed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def scene(model: nn.Module) -> None:
        output = model(*STEP.args)
        output.mul_(2)
        back(output.sum())

    both(build, scene)


def test_an_output_that_backward_does_not_need_may_be_changed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def scene(model: nn.Module) -> Outcome:
        output = model(*STEP.args)
        output.mul_(2)
        back(output.pow(2).sum())
        return gradients(model)

    both(build, scene)


def test_a_weight_that_a_hook_changes_while_a_later_stage_needs_it_raises() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(self.b(x).tanh()).tanh()).tanh()

    def scene(model: Any) -> Outcome:
        model.a.weight.register_hook(lambda g: model.b.weight.detach().mul_(2) * 0 + g)
        back(loss_of(model))
        return gradients(model)

    both(Twice, scene)


def test_optimizer_steps_in_hooks_work_where_they_do_in_eager() -> None:
    def scene(model: Any) -> Outcome:
        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            torch.manual_seed(0)
            back(loss_of(model))
        return [p.detach().clone() for p in model.parameters()]

    both(deep, scene)


def test_hooks_of_parameters_fire_while_backward_goes_on() -> None:
    model = optimized(make(deep), STEP)
    program = model.remat.planned.program
    events: list[str] = []
    stages = program.parts.stages
    assert len(stages) > 4
    for number, stage in enumerate(stages):
        run = stage.module.forward

        def logged(inputs: Any, number: int = number, run: Any = run) -> Any:
            events.append(f"stage {number}")
            return run(inputs)

        stage.module.forward = logged
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    back(loss_of(model))
    fired = [i for i, event in enumerate(events) if not event.startswith("stage")]
    last = max(i for i, event in enumerate(events) if event.startswith("stage"))
    assert len(fired) == len(list(model.parameters()))
    assert sum(i < last for i in fired) >= len(fired) // 2


def test_an_exception_in_a_hook_leaves_the_next_step_fine() -> None:
    model = optimized(make(deep), STEP)

    def fail(gradient: Tensor) -> None:
        raise ValueError("in the hook")

    handle = model[3].weight.register_hook(fail)
    with contextlib.suppress(ValueError):
        back(loss_of(model))
    assert model[9].weight.grad is not None
    assert model[0].weight.grad is None
    handle.remove()
    model.zero_grad()
    with (
        warnings.catch_warnings()
    ):  # torch keeps custom nodes that it did not come to, so a forward is left
        warnings.filterwarnings("ignore", "remat: 2 forwards are outstanding")
        assert same(record(model, STEP), record(make(deep), STEP))


def test_an_abandoned_forward_frees_its_memory_at_once() -> None:
    model = optimized(make(Net), STEP)
    output = model(*STEP.args)
    node = weakref.ref(output)
    assert model.remat.outstanding == 1
    gc.disable()
    try:
        del output
        assert node() is None
        assert model.remat.outstanding == 0
    finally:
        gc.enable()
    protocol = StepProtocol(outputs_held=False)
    model = optimized(make(Net), STEP, protocol=protocol)
    eager = make(Net)
    assert measure_peak(lambda: model(*STEP.args)) <= measure_peak(lambda: eager(*STEP.args))


def test_gradients_set_to_none_between_forward_and_backward() -> None:
    def scene(model: nn.Module) -> Outcome:
        seen = []
        for _ in range(3):
            torch.manual_seed(0)
            loss = loss_of(model)
            model.zero_grad()
            back(loss)
            seen += gradients(model)
        return seen

    both(deep, scene, protocol=StepProtocol(gradients_resident=True))


def test_the_budget_is_kept_while_gradients_are_accumulated() -> None:
    wide = Step((torch.randn(64, 32),))

    def build() -> nn.Module:
        layers = [(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
        return nn.Sequential(*(module for layer in layers for module in layer))

    options: dict[str, Any] = {"optimizer": None, "loss_fn": wide.loss}
    kept = StepProtocol(gradients_resident=True)
    budget = least(make(build), wide, protocol=kept, **options)
    model = optimized(make(build), wide, budget, **options)  # planned for absent gradients
    eager = make(build)
    back(loss_of(model, wide.args[0]))
    torch.manual_seed(0)

    def step(each: nn.Module) -> None:
        output = each(wide.args[0])
        back(output.pow(2).sum())

    peak = measure_peak(lambda: step(model))
    plan = model.remat.plan
    assert plan.protocol.gradients_resident
    assert model.remat.stats.plans == 2
    assert plan.resident_bytes + peak <= budget
    step(eager)
    back(loss_of(eager, wide.args[0]))
    assert peak < measure_peak(lambda: step(eager))


def test_backward_into_present_gradients_takes_little_more_than_eager() -> None:
    """Parameters are most of the memory here, so a copy of all gradients would show."""
    few = Step((torch.randn(2, 64),))

    def build() -> nn.Module:
        layers = [(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)]
        return nn.Sequential(*(module for layer in layers for module in layer))

    def backward(model: nn.Module) -> None:
        back(loss_of(model, few.args[0]))

    protocol = StepProtocol(gradients_resident=True)
    model, eager = optimized(make(build), few, protocol=protocol), make(build)
    peaks = [measure_peak(partial(backward, each), warmup=2) for each in (model, eager)]
    assert model.remat.stats.planned >= 3
    assert peaks[0] <= 1.25 * peaks[1]


def test_accumulating_over_steps_equals_eager() -> None:
    def scene(model: nn.Module) -> Outcome:
        torch.manual_seed(0)
        for _ in range(4):
            back(loss_of(model))
        return gradients(model)

    both(deep, scene, protocol=StepProtocol(gradients_resident=True))


def test_autocast_is_part_of_the_plan() -> None:
    step = Step(STEP.args, around=lambda: torch.autocast("cpu", torch.bfloat16))
    trained_alike(deep, step, steps=3)


def test_no_grad_inside_the_forward() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                target = self.a(x).tanh()
            return (self.b(x).sin() - target).tanh() + self.a(x).detach()

    trained_alike(Partly, STEP)


def test_planning_leaves_everything_as_it_was() -> None:
    model = make(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5))
    )
    back(loss_of(model))
    torch.manual_seed(5)
    state = copy.deepcopy(list(model.state_dict().items())), gradients(model)
    streams = torch.get_rng_state(), random.getstate()
    optimized(model, STEP, protocol=StepProtocol(gradients_resident=True))
    assert same((list(model.state_dict().items()), gradients(model)), state)
    assert same((torch.get_rng_state(), random.getstate()), streams)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(gradient, torch.cos(x) * 1.5)  # not the derivative, but the user's


@torch.library.custom_op("remat_tests::scaled_exp", mutates_args=())
def scaled_exp(x: Tensor, scale: float) -> Tensor:
    result: Tensor = torch.exp(x * scale)
    return result


@scaled_exp.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _exp_setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _exp_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (output,) = ctx.saved_tensors
    return gradient * output * ctx.scale, None


scaled_exp.register_autograd(_exp_backward, setup_context=_exp_setup)


def test_custom_functions_and_custom_ops() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            hidden = scaled_exp(Sine.apply(self.lin(x)), 0.5)  # type: ignore[no-untyped-call]
            return self.lin(hidden).tanh().sin()

    plans = trained_alike(Custom, STEP, count=1)
    assert any("scaled_exp" in tensor.op for tensor in (*plans[1].saved, *plans[1].recomputed))


@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm(old: bool) -> None:
    new_style = torch.nn.utils.parametrizations.spectral_norm

    def build() -> nn.Module:
        norm = nn.utils.spectral_norm if old else new_style
        return nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Tanh())

    trained_alike(build, STEP, steps=3, count=1)
