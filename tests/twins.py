"""A model made by hand and its drop-in, trained side by side under several budgets."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from remat import Plan, optimize_checkpoints

HUGE = 10**12
"""A budget that every model here fits, bytes."""
LOOSE: dict[str, Any] = {"gap": 1.0}
"""For tests that need a plan with recomputation, not the best one."""


@dataclass(frozen=True)
class Step:
    """One forward of a model, and the loss of its output."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = lambda output: output.pow(2).sum()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of the forward and the loss."""


def make(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in training mode; the same weights every time."""
    torch.manual_seed(0)
    return build().train()


def least(model: nn.Module, step: Step, **options: Any) -> int:
    """Smallest feasible budget, bytes."""
    plan = optimized(model, step, HUGE, **options).remat.plan
    return int(plan.least_peak_bytes)


def optimized(model: nn.Module, step: Step, budget: int | None = None, **options: Any) -> Any:
    """A drop-in under a budget in bytes; the smallest feasible one if none is given."""
    budget = least(model, step, **options) if budget is None else budget
    options = {**LOOSE, **options}
    with step.around():
        return optimize_checkpoints(model, f"{budget}B", step.args, step.kwargs, **options)


def budgets(model: nn.Module, step: Step, count: int = 2, **options: Any) -> list[int]:
    """One that is ample, then from the smallest feasible budget to just below eager's peak."""
    plan = optimized(model, step, HUGE, **options).remat.plan
    low, high = plan.least_peak_bytes, plan.baseline_peak_bytes
    return [HUGE] + [low + (high - low) * i // count for i in range(count)]


def record(model: nn.Module, step: Step, steps: int = 2) -> list[Any]:
    """Train from a fixed seed; returns all that the steps computed, None where a gradient is missing."""
    seen: list[Any] = []
    torch.manual_seed(1)
    for _ in range(steps):
        with step.around():
            output = model(*step.args, **step.kwargs)
            loss = step.loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        seen += [type(output).__name__, loss.detach().clone()]
        for name, parameter in model.named_parameters():
            seen.append((name, None if parameter.grad is None else parameter.grad.clone()))
        seen += [(name, buffer.clone()) for name, buffer in model.named_buffers()]
        seen.append(torch.get_rng_state())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        model.zero_grad()
    return seen


def same(these: object, those: object) -> bool:
    """Equal structure, bit for bit the same tensors."""
    if isinstance(these, Tensor):
        return isinstance(those, Tensor) and torch.equal(these, those)
    if isinstance(these, list | tuple):
        return (
            isinstance(those, list | tuple)
            and len(these) == len(those)
            and all(map(same, these, those))
        )
    return these == those


def trained_alike(
    build: Callable[[], nn.Module], step: Step, *, steps: int = 2, count: int = 2, **options: Any
) -> list[Plan]:
    """Check that planned steps equal eager ones at every budget; returns the plans."""
    expected = record(make(build), step, steps)
    dropin = optimized(make(build), step, HUGE, **options)
    low, high = dropin.remat.plan.least_peak_bytes, dropin.remat.plan.baseline_peak_bytes
    plans: list[Plan] = []
    for budget in (HUGE, *(low + (high - low) * i // count for i in range(count))):
        if plans:
            dropin = optimized(make(build), step, budget, **options)
        assert same(record(dropin, step, steps), expected), f"differs at {budget} bytes"
        assert dropin.remat.stats.planned == steps
        assert not dropin.remat.stats.fallbacks
        plans.append(dropin.remat.plan)
    assert plans[0].is_eager
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    return plans
