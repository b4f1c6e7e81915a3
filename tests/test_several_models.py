"""Several models in one step: each plan counts what the others hold, so all stay under the budget."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import equal

import remat.dropin
from remat import (
    InfeasibleBudgetError,
    StepProtocol,
    measure_peak,
    optimize_checkpoints,
    resident_bytes,
)

WIDTH = 32
ROWS = 256

pytestmark = pytest.mark.filterwarnings("ignore:remat. made another plan")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Drop-ins of other tests that only cycles keep alive do not count here."""
    gc.collect()
    yield
    gc.collect()


def perceptron(out: int, blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, out))


def score_all(logits: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.ones(ROWS, 1))


Models = tuple[nn.Module, nn.Module]


def gan_models() -> Models:
    torch.manual_seed(0)
    return perceptron(WIDTH, 2), perceptron(1, 2)


def gan_step(generator: nn.Module, discriminator: nn.Module) -> Callable[[], list[Tensor]]:
    """The loop of the DCGAN tutorial: the generator's forward is outstanding while the other one steps."""
    g = torch.optim.Adam(generator.parameters(), lr=0.01)
    d = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    real, ones, zeros = torch.randn(ROWS, WIDTH), torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    score = functional.binary_cross_entropy_with_logits

    def step() -> list[Tensor]:
        discriminator.zero_grad()
        on_real = score(discriminator(real), ones)
        on_real.backward()  # type: ignore[no-untyped-call]
        fake = generator(torch.randn(ROWS, WIDTH))
        on_fake = score(discriminator(fake.detach()), zeros)
        on_fake.backward()  # type: ignore[no-untyped-call]
        d.step()
        generator.zero_grad()
        fooled = score(discriminator(fake), ones)
        fooled.backward()  # type: ignore[no-untyped-call]
        g.step()
        return [on_real.detach(), on_fake.detach(), fooled.detach()]

    return step


def trained(models: Models, step: Callable[[], list[Tensor]], steps: int) -> list[Tensor]:
    torch.manual_seed(7)
    seen = [loss for _ in range(steps) for loss in step()]
    return seen + [p.detach().clone() for model in models for p in model.parameters()]


def optimised(model: nn.Module, budget: int, **options: Any) -> Any:
    return optimize_checkpoints(model, f"{budget}B", time_limit_s=1, **options)


def test_a_gan_trains_as_in_eager_and_the_whole_step_stays_under_the_budget() -> None:
    models = gan_models()
    torch.manual_seed(1)
    step = gan_step(*models)
    parameters = sum(map(resident_bytes, models))
    expected = trained(models, step, 2)
    counters = 2 * 4 * sum(len(list(model.parameters())) for model in models)  # Adam counts steps
    data = ROWS * (WIDTH + 2) * 4
    held = 4 * parameters + counters + data  # gradients and two moments, too
    budget = held + measure_peak(step) - 100_000
    del models, step
    protocol = StepProtocol(gradients_resident=True, other_bytes=data + 3 * 4)  # and the losses
    generator, discriminator = gan_models()
    g = optimised(generator, budget, protocol=protocol)
    d = optimised(discriminator, budget, protocol=protocol, loss_fn=score_all)
    torch.manual_seed(1)
    step = gan_step(g, d)
    assert equal(trained((g, d), step, 2), expected)
    assert g.remat.stats.fallbacks == d.remat.stats.fallbacks == {}
    # Of the discriminator: alone, beside the generator's forward, and for the generator's step.
    assert (g.remat.stats.plans, d.remat.stats.plans) == (1, 3)
    assert d.remat.plan.repetitions
    assert held + measure_peak(step) <= budget
    assert (g.remat.stats.plans, d.remat.stats.plans) == (1, 3), "planned anew in a settled loop"


def test_a_student_counts_a_frozen_teacher_of_either_kind() -> None:
    torch.manual_seed(0)
    student, teacher, x = perceptron(WIDTH, 2), perceptron(WIDTH, 6).eval(), torch.randn(64, WIDTH)
    teacher.requires_grad_(False)
    weights = sum(p.nbytes for p in teacher.parameters())
    assert resident_bytes(teacher) == weights

    def plan_beside(**options: Any) -> Any:
        made = optimised(student, 10**6, optimizer="SGD", **options)
        functional.mse_loss(made(x), teacher(x)).backward()  # type: ignore[no-untyped-call]
        student.zero_grad()
        return made.remat.plan

    alone = plan_beside()
    gc.collect()
    told = plan_beside(protocol=StepProtocol(other_bytes=resident_bytes(teacher)))
    gc.collect()
    teacher = optimised(teacher, 10**6)
    seen = plan_beside()
    assert told.resident_bytes == seen.resident_bytes == alone.resident_bytes + weights
    assert told.peak_bytes == seen.peak_bytes == alone.peak_bytes + weights
    assert teacher.remat.stats.plans == 0


def test_what_a_trained_model_holds_is_the_same_before_and_after_its_first_step() -> None:
    model = perceptron(WIDTH, 1)
    parameters = sum(p.nbytes for p in model.parameters())
    adam = torch.optim.Adam(model.parameters())
    before = resident_bytes(model, adam)
    model(torch.randn(4, WIDTH)).sum().backward()
    adam.step()
    assert before == resident_bytes(model, adam) == 4 * parameters + 4 * len(adam.state)
    assert resident_bytes(model) == 2 * parameters
    model.zero_grad()
    assert resident_bytes(model) == parameters


@pytest.mark.slow
def test_tensors_that_models_share_count_once() -> None:
    first = optimised(perceptron(WIDTH, 1), 10**6, optimizer="SGD")
    first(torch.randn(4, WIDTH)).sum().backward()
    alone = first.remat.plan.resident_bytes
    first.zero_grad()
    second = optimised(first, 10**6, optimizer="SGD")
    second(torch.randn(4, WIDTH)).sum().backward()
    assert second.remat.plan.resident_bytes == alone


@pytest.mark.slow
def test_an_average_of_a_model_counts_its_parameters_only() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, WIDTH), optimised(perceptron(WIDTH, 2), 10**6)
    parameters = resident_bytes(model)
    adam = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    alone = model.remat.plan.resident_bytes
    model.zero_grad()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    model(x).sum().backward()
    assert model.remat.plan.resident_bytes == alone + parameters
    assert model.remat.stats.plans == 2
    del adam


def test_calls_whose_arguments_need_other_gradients_have_plans_of_their_own() -> None:
    torch.manual_seed(0)
    model = perceptron(1, 2)
    twin, x = copy.deepcopy(model), torch.randn(32, WIDTH)
    planned = optimised(model, 10**6, recompute=("::aten.gelu*",), optimizer="SGD")
    for needs in (False, True, False, True):
        inputs = [x.clone().requires_grad_(needs) for _ in range(2)]
        for made, argument in zip((twin, planned), inputs, strict=True):
            torch.manual_seed(1)
            made(argument).sum().backward()
        gradients = [[p.grad for p in m.parameters()] for m in (twin, planned)]
        assert equal(*gradients)  # type: ignore[arg-type]
        assert not needs or torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
        twin.zero_grad()
        model.zero_grad()
    assert (planned.remat.stats.planned, planned.remat.stats.plans) == (4, 2)
    assert planned.remat.stats.fallbacks == {}


def test_a_budget_that_others_fill_names_them_and_a_plan_for_an_example_is_as_told() -> None:
    torch.manual_seed(0)
    other, x = optimised(perceptron(WIDTH, 30), 10**6), torch.randn(4, WIDTH)
    held = resident_bytes(other)
    lazy = optimised(perceptron(WIDTH, 1), held, optimizer="SGD")
    with pytest.raises(InfeasibleBudgetError) as caught:
        lazy(x)
    assert caught.value.__notes__ == [
        f"{held} bytes are counted for other models in this process."
    ]
    told = optimised(perceptron(WIDTH, 1), held, optimizer="SGD", example_args=(x,))
    told(x).sum().backward()
    assert told.remat.plan.resident_bytes < held
    assert (told.remat.stats.planned, told.remat.stats.plans) == (1, 1)


def test_a_step_that_the_device_cannot_hold_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = optimised(perceptron(WIDTH, 8), 10**6)
    model, x = optimised(perceptron(WIDTH, 1), 10**6, optimizer="SGD"), torch.randn(4, WIDTH)
    monkeypatch.setattr(remat.dropin, "available_memory", lambda device: 1000)
    with pytest.warns(UserWarning, match=rf"{resident_bytes(other)} of them for other models"):
        model(x).sum().backward()
    model(x).sum().backward()


def test_a_module_that_is_no_drop_in_any_more_is_not_counted() -> None:
    failed = nn.Linear(8, 8)
    with pytest.raises(InfeasibleBudgetError):
        optimize_checkpoints(failed, "1B", (torch.randn(4, 8),), inplace=True, time_limit_s=1.0)
    assert type(failed) is nn.Linear
    model: Any = optimize_checkpoints(nn.Linear(8, 8), "1GB", time_limit_s=1.0)
    again: Any = optimize_checkpoints(model, "1GB", inplace=True, time_limit_s=1.0)
    again(torch.randn(4, 8)).sum().backward()
    assert again.remat.plan.protocol.other_bytes == 0
