"""The main promise, on public model families: the same training, under the budget, byte for byte."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import zoo
from torch import Tensor
from training import HUGE, Loop, MakeOptimizer, eager, equal, planned

from remat import InfeasibleBudgetError, StepProtocol, measure_peak

STEPS = 2
LOOSE = StepProtocol(outputs_held=False)
"""``loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()``"""
PROTOCOLS = {
    "outputs dropped": LOOSE,
    "outputs held": StepProtocol(),
    "gradients accumulated": StepProtocol(outputs_held=False, gradients_resident=True),
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "no optimizer": None,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


def check(loop: Loop, reference: Sequence[Tensor]) -> None:
    """The drop-in trains as eager does, and takes the bytes that its plan says."""
    plan, stats = loop.plan, vars(loop.model)["remat"].stats
    assert equal(loop.record(STEPS), reference)
    assert plan.resident_bytes + measure_peak(loop.step) == plan.peak_bytes
    assert plan.peak_bytes <= plan.budget_bytes
    assert stats.planned > STEPS
    assert (stats.plans, dict(stats.fallbacks)) == (1, {})


def train_under_budgets(
    name: str,
    large: bool,
    make: MakeOptimizer,
    protocol: StepProtocol,
    budgets: int,
    gap: float = 0.01,
) -> list[Loop]:
    """Train eager, then under evenly spaced budgets from the baseline to the least; checks each."""
    reference = eager(zoo.build(name, large=large), make, protocol).record(STEPS)
    loops = [planned(zoo.build(name, large=large), make, protocol)]
    check(loops[0], reference)
    assert loops[0].plan.is_eager
    assert loops[0].plan.overhead == 0
    most, least = loops[0].plan.baseline_peak_bytes, loops[0].plan.least_peak_bytes
    for i in range(1, budgets):
        budget = most - (most - least) * i // (budgets - 1)
        case = zoo.build(name, large=large)
        loops.append(planned(case, make, protocol, budget, gap))
        check(loops[-1], reference)
    return loops


# One of each kind by default: these have a like in the list.
LIKE_OTHERS = (
    *("bert", "dlrm", "llama", "mixtral", "t5", "transformer", "unet2d", "vae", "vit", "whisper"),
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name
        for name in zoo.NAMES
    ],
)
def test_a_model_trains_as_eager_at_the_baseline_and_at_the_least_budget(name: str) -> None:
    loops = train_under_budgets(name, True, OPTIMIZERS["AdamW"], LOOSE, budgets=2, gap=1.0)
    assert loops[1].plan.peak_bytes < loops[0].plan.peak_bytes
    assert loops[1].plan.recomputed


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "outputs held"))
        for name in PROTOCOLS
    ],
)
@pytest.mark.parametrize(
    "optimizer", [pytest.param("no optimizer", marks=pytest.mark.slow), "SGD"]
)
@pytest.mark.parametrize("name", ["dlrm", pytest.param("mlp", marks=pytest.mark.slow)])
def test_other_loops_and_optimizers_are_predicted_to_the_byte(
    name: str, optimizer: str, protocol: str
) -> None:
    make, kept = OPTIMIZERS[optimizer], PROTOCOLS[protocol]
    train_under_budgets(name, True, make, kept, budgets=3, gap=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_four_budgets_down_to_the_least_keep_every_promise(name: str, large: bool) -> None:
    loops = train_under_budgets(name, large, OPTIMIZERS["AdamW"], LOOSE, budgets=4)
    plans = [loop.plan for loop in loops]
    assert [plan.gap <= 0.01 for plan in plans] == [True] * 4, [plan.gap for plan in plans]
    for more, less in pairwise(plans):
        assert more.overhead <= less.overhead + more.gap


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_model_is_predicted_to_the_byte_in_every_loop(
    name: str, optimizer: str, protocol: str
) -> None:
    make, kept = OPTIMIZERS[optimizer], PROTOCOLS[protocol]
    train_under_budgets(name, False, make, kept, budgets=2, gap=1.0)


def test_one_byte_less_than_the_least_budget_is_refused() -> None:
    least = planned(zoo.build("mlp"), None, LOOSE, HUGE).plan.least_peak_bytes
    planned(zoo.build("mlp"), None, LOOSE, least, gap=1.0)
    with pytest.raises(
        InfeasibleBudgetError, match=f"least feasible peak: {least} bytes"
    ) as refused:
        planned(zoo.build("mlp"), None, LOOSE, least - 1)
    assert refused.value.least_peak_bytes == least
