import pytest
import torch
import zoo
from torch import Tensor

from remat.measure import measure_peak


def train_once(case: zoo.Case) -> list[Tensor]:
    """Loss, then the gradients of all parameters that got one."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = case.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_case_is_deterministic_and_every_module_learns(name: str) -> None:
    first, second = (train_once(zoo.build(name)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(value.isfinite().all() for value in first)
    assert sum(bool(value.count_nonzero()) for value in first) >= 0.9 * len(first)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_dropout_or_sampling_makes_the_step_random(name: str) -> None:
    case = zoo.build(name)
    losses = {case.loss().item() for _ in range(3)}
    assert (len(losses) > 1) != (name == "resnet")


def test_building_leaves_the_random_stream_alone() -> None:
    before = torch.get_rng_state()
    zoo.build("mlp")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.NAMES)
def test_large_case_has_ten_times_more_activations_than_parameters(name: str) -> None:
    case = zoo.build(name, large=True)
    parameters = sum(p.nbytes for p in case.model.parameters())

    def step() -> None:
        train_once(case)
        case.model.zero_grad(set_to_none=True)

    assert measure_peak(step) - parameters > 10 * parameters
