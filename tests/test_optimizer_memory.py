"""State and temporaries of every optimizer in torch, in bytes a parameter, by analysis and by measuring.

The figures are those of fp32 parameters on the CPU; a temporary is what is held beside parameters,
gradients and state at the peak of a late step.
"""

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
optim = torch.optim
Case = tuple[type[Optimizer], dict[str, Any], float]
"""Class, options, bytes of state a parameter."""
FORMS: dict[str, Case] = {
    "SGD": (optim.SGD, {}, 0),
    "SGD momentum": (optim.SGD, {"momentum": 0.9}, 4),
    "Adam": (optim.Adam, {}, 8),
    "AdamW": (optim.AdamW, {}, 8),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}, 12),
    "Adagrad": (optim.Adagrad, {}, 4),
    "RMSprop": (optim.RMSprop, {}, 4),
    "Adadelta": (optim.Adadelta, {}, 8),
    "Adamax": (optim.Adamax, {}, 8),
    "NAdam": (optim.NAdam, {}, 8),
    "RAdam": (optim.RAdam, {}, 8),
    "Rprop": (optim.Rprop, {}, 8),
    "ASGD": (optim.ASGD, {}, 4),
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
FUSED = ("SGD momentum", "AdamW", "Adagrad")
ALL: dict[str, Case] = {
    **{name: (cls, {**options, "foreach": True}, s) for name, (cls, options, s) in FORMS.items()},
    **{f"{n} loop": (cls, {**o, "foreach": False}, s) for n, (cls, o, s) in FORMS.items()},
    **{f"{n} fused": (FORMS[n][0], {**FORMS[n][1], "fused": True}, FORMS[n][2]) for n in FUSED},
    "Muon": (optim.Muon, {}, 4),
    "Adafactor": (optim.Adafactor, {}, 8 / SIDE),
}


@pytest.mark.parametrize("name", list(ALL))
def test_state_and_temporaries(name: str) -> None:
    cls, options, state = ALL[name]
    parameters = [nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(2)]
    optimizer = cls(parameters, **options)
    trace = optimizer_trace(parameters, optimizer, scratch=measure_scratch)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    found = profile(trace)
    held = sum(int(b.size) for b in trace.blocks if b.role is Role.OPTIMIZER_STATE)
    assert abs(held / COUNT - state) < 0.01  # step counts are beside it
    assert found.peak - found.resident == measure_peak(lambda: optimizer.step(), warmup=8)
    if name in TEMPORARIES:
        assert round((found.peak - found.resident) / COUNT, 1) == TEMPORARIES[name]
