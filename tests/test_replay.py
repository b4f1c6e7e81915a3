"""A known plan, put on a captured step again: run only where it is a plan of that step and fits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import DROPPED, Net
from torch import nn

import remat.making
import remat.planner
from remat import Plan, optimize_checkpoints
from remat.planner import make_plan

BUDGET = 450_000
"""Bytes; between the least peak of the step, 301 kB, and eager's, 661 kB."""


def planned(
    known: Plan | None, patch: pytest.MonkeyPatch, budget: int = BUDGET, blocks: int = 2
) -> tuple[Any, int]:
    """A drop-in that is offered a plan, and how often it searched for one of its own."""
    searches: list[int] = []
    real = remat.planner.arranged  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        searches.append(1)
        return real(*args)

    def offered(request: Any, report: Any, prepared: Any, name: str, first: bool) -> Any:
        return make_plan(request, report, prepared, lambda prepared: known)

    torch.manual_seed(0)
    with patch.context() as patched:
        patched.setattr(remat.planner, "arranged", counted)
        patched.setattr(remat.making, "plan_together", offered)
        model = optimize_checkpoints(
            Net(blocks),
            f"{budget}B",
            (torch.randn(256, 32),),
            optimizer="SGD",
            protocol=DROPPED,
            time_limit_s=1,
        )
    return model, len(searches)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model(torch.randn(256, 32)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_known_plan_is_run_again_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, searches = planned(None, monkeypatch)
    assert searches == 1
    plan = solved.remat.plan
    assert plan.repetitions
    again, searches = planned(Plan.from_json(plan.to_json()), monkeypatch)
    assert searches == 0
    assert again.remat.plan == plan
    pairs = zip(gradients(again), gradients(solved), strict=True)
    assert all(torch.equal(got, expected) for got, expected in pairs)


def test_a_plan_that_takes_more_than_the_budget_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, _ = planned(None, monkeypatch)
    plan = solved.remat.plan
    tighter, searches = planned(plan, monkeypatch, plan.peak_bytes - 1)
    assert searches == 1
    assert tighter.remat.plan.peak_bytes < plan.peak_bytes
    eager = replace(plan, steps=())
    made, searches = planned(eager, monkeypatch)
    assert searches == 1
    assert not made.remat.plan.is_eager


@pytest.mark.slow
def test_a_plan_of_another_step_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, _ = planned(None, monkeypatch)
    steps = solved.remat.plan.steps
    wrong_order = replace(solved.remat.plan, steps=(steps[1], steps[0], *steps[2:]))
    missing = replace(solved.remat.plan, steps=steps[:-1])
    for known, blocks in ((wrong_order, 2), (missing, 2), (solved.remat.plan, 1)):
        made, searches = planned(known, monkeypatch, BUDGET if blocks == 2 else 250_000, blocks)
        assert searches == 1
        assert made.remat.plan.steps != known.steps
