"""State and temporaries of every optimizer in torch, in bytes a parameter, by analysis and by measuring.

The figures are those of fp32 parameters on the CPU; a temporary is what is held beside parameters,
gradients and state at the peak of a late step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from remat import measure_peak
from remat.ir import Role
from remat.passes import measure_scratch, optimizer_trace, profile

SIDE = 64
COUNT = 2 * SIDE * SIDE
Make = Callable[[Any], Optimizer]
FOREACH: dict[str, tuple[Make, float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, foreach=True), 0),
    "SGD momentum": (lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True), 4),
    "Adam": (lambda p: torch.optim.Adam(p, foreach=True), 8),
    "AdamW": (lambda p: torch.optim.AdamW(p, foreach=True), 8),
    "AdamW amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True), 12),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, foreach=True), 4),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, foreach=True), 4),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, foreach=True), 8),
    "Adamax": (lambda p: torch.optim.Adamax(p, foreach=True), 8),
    "NAdam": (lambda p: torch.optim.NAdam(p, foreach=True), 8),
    "RAdam": (lambda p: torch.optim.RAdam(p, foreach=True), 8),
    "Rprop": (lambda p: torch.optim.Rprop(p, foreach=True), 8),
    "ASGD": (lambda p: torch.optim.ASGD(p, foreach=True), 4),
}
LOOP: dict[str, tuple[Make, float]] = {
    "SGD loop": (lambda p: torch.optim.SGD(p, momentum=0.9, foreach=False), 4),
    "AdamW loop": (lambda p: torch.optim.AdamW(p, foreach=False), 8),
    "Adagrad loop": (lambda p: torch.optim.Adagrad(p, foreach=False), 4),
    "Adadelta loop": (lambda p: torch.optim.Adadelta(p, foreach=False), 8),
    "Adamax loop": (lambda p: torch.optim.Adamax(p, foreach=False), 8),
    "NAdam loop": (lambda p: torch.optim.NAdam(p, foreach=False), 8),
    "RAdam loop": (lambda p: torch.optim.RAdam(p, foreach=False), 8),
    "RMSprop loop": (lambda p: torch.optim.RMSprop(p, foreach=False), 4),
    "Rprop loop": (lambda p: torch.optim.Rprop(p, foreach=False), 8),
    "ASGD loop": (lambda p: torch.optim.ASGD(p, foreach=False), 4),
    "Muon": (torch.optim.Muon, 4),
    "SGD fused": (lambda p: torch.optim.SGD(p, momentum=0.9, fused=True), 4),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, fused=True), 8),
    "Adagrad fused": (lambda p: torch.optim.Adagrad(p, fused=True), 4),
}
TEMPORARIES = {  # whole bytes a parameter of the foreach forms, as published for torch 2.13
    "SGD": 0,
    "SGD momentum": 0,
    "Adam": 4,
    "AdamW": 4,
    "AdamW amsgrad": 4,
    "Adagrad": 8,
    "RMSprop": 4,
    "Adadelta": 8,
    "Adamax": 4,
    "NAdam": 4,
    "RAdam": 4,
    "ASGD": 4,
}
ALL = {**FOREACH, **LOOP, "Adafactor": (torch.optim.Adafactor, 8 / SIDE)}


@pytest.mark.parametrize("name", list(ALL))
def test_state_and_temporaries(name: str) -> None:
    make, state = ALL[name]
    parameters = [nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(2)]
    optimizer = make(parameters)
    trace = optimizer_trace(parameters, optimizer, scratch=measure_scratch)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    found = profile(trace)
    held = sum(int(b.size) for b in trace.blocks if b.role is Role.OPTIMIZER_STATE)
    assert abs(held / COUNT - state) < 0.01  # step counts are beside it
    assert found.peak - found.resident == measure_peak(lambda: optimizer.step(), warmup=8)
    if name in TEMPORARIES:
        assert round((found.peak - found.resident) / COUNT, 1) == TEMPORARIES[name]
