"""Orders: any legal one computes the same bits; the chosen one is in the plan, with what it gave."""

import random
from collections.abc import Callable

import pytest
import torch
import zoo
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from modules import builders
from test_passes_schedules import problem_of
from training import Loop, eager, equal, planned

from remat import Plan, StepProtocol, measure_peak, orders, planner
from remat.ir import verify
from remat.passes import (
    Index,
    Prepared,
    emit_schedule,
    find_order,
    must_precede,
    planned_trace,
    prepare_step,
    profile,
    reorder_step,
)
from remat.solvers import Problem, evaluate

LOOSE = StepProtocol(outputs_held=False)
PROTOCOLS = st.builds(StepProtocol, gradients_resident=st.booleans(), outputs_held=st.booleans())


def some_order(prepared: Prepared, index: Index, seed: int) -> tuple[int, ...]:
    """A random legal order, as far from the captured one as it comes."""
    rng = random.Random(seed)
    n, border = len(index.ops), index.ops.index(prepared.graph.border)
    before: list[set[int]] = [set() for _ in range(n)]
    for a, b in must_precede(prepared, index):
        before[b].add(a)
    done: list[int] = []
    for side in (range(border), [border], range(border + 1, n)):
        left = set(side)
        while left:
            done.append(rng.choice(sorted(v for v in left if before[v].isdisjoint(left))))
            left.remove(done[-1])
    return tuple(done)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.too_slow],  # capture takes some tenths of a second
)
@given(builders(3), st.integers(0, 2**32), PROTOCOLS)
def test_a_step_in_any_legal_order_is_judged_to_the_byte(
    build: Callable[[], zoo.Case], seed: int, protocol: StepProtocol
) -> None:
    case = build()
    prepared = prepare_step(case.model, case.args, case.kwargs)
    _, index = problem_of(prepared, protocol)
    permutation = some_order(prepared, index, seed)
    other = reorder_step(prepared, index, permutation)
    problem, new = problem_of(other, protocol)
    names = [other.graph.ops[op].name for op in new.ops]
    assert names == [prepared.graph.ops[index.ops[v]].name for v in permutation]
    drawn = [op.name for op in other.graph.ops if op.random]
    assert drawn == [op.name for op in prepared.graph.ops if op.random]
    schedule = range(len(problem.ops))
    emitted = emit_schedule(other, new, schedule, protocol)
    verify(emitted.graph)
    found = profile(planned_trace(emitted.graph, emitted.ranges))
    assert found.peak == evaluate(problem, schedule).peak


def in_order(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    find: Callable[[Prepared, Problem, Index], tuple[int, ...]],
    *,
    large: bool,
) -> Loop:
    """A loop that runs in the order that `find` gives, whether it is better or not."""
    monkeypatch.setattr(orders, "find_order", find)
    monkeypatch.setattr(planner, "choose", lambda candidates: candidates[-1])
    plan = planned(zoo.build(name, large=large), None, LOOSE).plan
    budget = (plan.baseline_peak_bytes + plan.least_peak_bytes) // 2
    return planned(zoo.build(name, large=large), None, LOOSE, budget, gap=0.1)


def check(loop: Loop, *, large: bool) -> None:
    assert loop.plan.reordered
    reference = eager(zoo.build(loop.case.name, large=large), None, LOOSE).record(2)
    assert equal(loop.record(2), reference)
    assert loop.plan.resident_bytes + measure_peak(loop.step) == loop.plan.peak_bytes
    assert loop.plan.peak_bytes <= loop.plan.budget_bytes


# The small MLP is left out: eager already takes the least.
@pytest.mark.parametrize(
    "name",
    [
        "dlrm",
        *(pytest.param(n, marks=pytest.mark.slow) for n in zoo.NAMES if n not in ("dlrm", "mlp")),
    ],
)
def test_a_model_trains_as_eager_in_a_random_order(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def find(prepared: Prepared, problem: Problem, index: Index) -> tuple[int, ...]:
        return some_order(prepared, index, seed=1)

    check(in_order(monkeypatch, name, find, large=False), large=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "vit", "t5", "resnet", "unet2d"])
def test_a_model_trains_as_eager_in_the_order_for_memory(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check(in_order(monkeypatch, name, find_order, large=True), large=True)


class Wide(torch.nn.Module):
    """The gradient of the second weight is small, and computed first it frees what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 1024)
        self.down = torch.nn.Linear(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x))
        return y.square().sum()


def test_the_plan_says_what_order_gave() -> None:
    case = zoo.Case("wide", Wide(), (torch.ones(512, 16),), {}, lambda output: output)
    loop = planned(case, None, LOOSE, 3_000_000)
    plan, ledger = loop.plan, loop.plan.ledger
    assert ledger is not None
    assert ledger.captured >= ledger.ordered >= ledger.in_place >= ledger.planned
    assert ledger.planned == plan.peak_bytes
    assert plan.reordered
    assert plan.overhead == 0
    assert ledger.captured > plan.budget_bytes > ledger.ordered
    assert Plan.from_json(plan.to_json()) == plan
    assert "as captured: order -" in vars(loop.model)["remat"].explain()
    assert equal(loop.record(2), eager(case, None, LOOSE).record(2))
