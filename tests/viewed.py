"""Steps for the tests of viewers: of a small model, planned and eager, and random ones."""

from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from remat import analyze, optimize_checkpoints
from remat.views.step_report import ExecutedOp, HeldTensor, StepReport, Timeline

PHASES = ("forward", "backward", "optimizer step")
ROLES = ("parameter", "gradient", "activation", "temporary", "output", "a role of tomorrow")


class Small(nn.Module):
    """A few layers, all alike, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@cache
def small_reports() -> dict[str, StepReport]:
    """The planned step of a small model, with the eager one as its baseline, and an analysis of it."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(64, 32)
    analysis = analyze(model, (x,), optimizer="AdamW").step_report()
    budget = f"{int(analysis.timeline.peak * 0.8)}B"
    planned: Any = optimize_checkpoints(model, budget, (x,), optimizer="AdamW")
    return {"planned": planned.remat.report(), "eager": analysis}


def report_of(timeline: Timeline, **changes: object) -> StepReport:
    """A report of one timeline, with nothing else in it."""
    found: dict[str, object] = {
        "model": "M",
        "device": "cpu",
        "sizes": {},
        "optimizer": "",
        "loss": "",
        "versions": {},
        "budget_bytes": None,
        "timeline": timeline,
        "baseline": None,
        "plan": None,
        "formulas": (),
        "frontier": (),
        "notes": (),
    }
    return StepReport(**(found | changes))  # type: ignore[arg-type]


def op(name: str, phase: str = "forward", time_ns: int = 0, scratch: int = 0) -> ExecutedOp:
    return ExecutedOp(name, "aten.op", phase, False, time_ns, scratch, "layers.0", "m.py:3")


def tensor(name: str, size: int, birth: int, death: int, role: str = "activation") -> HeldTensor:
    return HeldTensor(name, role, size, birth, death, "", "aten.op", "layers.0", "m.py:3")


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any step: phases in any order, tensors empty and not, from before the step and after it."""
    n = draw(st.integers(0, 8))
    numbers = st.integers(0, 3000)
    ops = [
        op(
            f"op_{i}",
            draw(st.sampled_from(PHASES)),
            draw(numbers),
            draw(st.sampled_from((0, 7, 900))),
        )
        for i in range(n)
    ]
    tensors = []
    for i in range(draw(st.integers(0, 12))):
        birth = draw(st.integers(-1, n - 1))
        death = draw(st.integers(max(birth, 0), n))
        tensors.append(tensor(f"t_{i}", draw(numbers), birth, death, draw(st.sampled_from(ROLES))))
    return Timeline("eager", tuple(ops), tuple(tensors))
