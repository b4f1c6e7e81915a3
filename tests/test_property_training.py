"""Random modules train as eager does, under every budget, byte for byte as predicted."""

from collections.abc import Callable

import torch
import zoo
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from modules import builders
from training import eager, equal, planned

from remat import StepProtocol, measure_peak

STEPS = 2
PROTOCOLS = [
    StepProtocol(outputs_held=False),
    StepProtocol(),
    StepProtocol(outputs_held=False, gradients_resident=True),
]


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # a smaller example would take minutes to find
    suppress_health_check=[HealthCheck.too_slow],  # planning takes a second or more
)
@given(builders(), st.sampled_from(PROTOCOLS), st.sampled_from([None, torch.optim.AdamW]))
def test_random_modules_train_as_eager_in_the_bytes_predicted(
    build: Callable[[], zoo.Case],
    protocol: StepProtocol,
    make: Callable[..., torch.optim.Optimizer] | None,
) -> None:
    reference = eager(build(), make, protocol).record(STEPS)
    plan = planned(build(), make, protocol).plan
    most, least = plan.baseline_peak_bytes, plan.least_peak_bytes
    for budget in (most, (most + least) // 2, least):
        loop = planned(build(), make, protocol, budget, gap=1.0)
        assert equal(loop.record(STEPS), reference)
        assert loop.plan.resident_bytes + measure_peak(loop.step) == loop.plan.peak_bytes
        assert loop.plan.peak_bytes <= budget
