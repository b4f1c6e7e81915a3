import pytest
import torch
from torch import nn

from remat.measure import measure_peak


def test_simultaneous_allocations_add_up() -> None:
    def step() -> None:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(200)
        del second, third

    assert measure_peak(step) == 4 * (1000 + 500)


def test_a_step_that_allocates_nothing_peaks_at_zero() -> None:
    held = torch.zeros(100)
    assert measure_peak(lambda: held.add_(held)) == 0


def test_memory_from_before_the_step_is_not_counted_and_makes_room_when_freed() -> None:
    held = [torch.empty(1000)]

    def step() -> None:
        held.clear()
        held.append(torch.empty(1000))
        scratch = torch.empty(10)
        del scratch

    assert measure_peak(step) == 40


def test_memory_that_the_step_leaves_behind_is_counted() -> None:
    kept: list[torch.Tensor] = []
    assert measure_peak(lambda: kept.append(torch.empty(25))) == 100


def test_warmup_runs_the_step_that_often_before() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(len(calls))
        torch.empty(len(calls))

    assert measure_peak(step, warmup=3) == 16
    assert calls == [0, 1, 2, 3]


def test_backward_and_its_gradients_are_counted() -> None:
    model = nn.Linear(10, 20, bias=False)
    x = torch.randn(5, 10)

    def step() -> None:
        model(x).backward(torch.ones(5, 20))
        model.zero_grad()

    # output and its tangent (5 x 20 each) when the gradient (20 x 10) is allocated.
    assert measure_peak(step) == 4 * (100 + 100 + 200)


def test_an_exception_of_the_step_is_passed_on() -> None:
    def step() -> None:
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        measure_peak(step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_steps_are_measured_on_cuda() -> None:
    def step() -> None:
        first = torch.empty(1024, device="cuda")
        second = torch.empty(2048, device="cuda")
        del first, second

    assert measure_peak(step) == 4 * (1024 + 2048)
