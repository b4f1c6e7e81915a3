"""The user's say: patterns are hard constraints, or errors that name them."""

from fnmatch import fnmatchcase

import pytest
import torch
import zoo
from torch import nn
from training import HUGE, Loop, eager, equal

from remat import (
    InfeasibleBudgetError,
    PatternError,
    Plan,
    StepProtocol,
    measure_peak,
    optimize_checkpoints,
)
from remat.passes import Tensor

LOOSE = StepProtocol(outputs_held=False)


def demanding(
    name: str, budget: int, save: tuple[str, ...] = (), recompute: tuple[str, ...] = ()
) -> Loop:
    loop = eager(zoo.build(name, large=True), None, LOOSE)
    case = loop.case
    loop.model = optimize_checkpoints(
        case.model,
        f"{budget}B",
        case.args,
        case.kwargs,
        loss_fn=case.loss_fn,
        optimizer=None,
        protocol=LOOSE,
        gap=0.05,
        save=save,
        recompute=recompute,
    )
    return loop


def middle(name: str) -> Plan:
    """The plan that the solver would choose, half way between eager's peak and the least."""
    plan = demanding(name, HUGE).plan
    return demanding(name, (plan.baseline_peak_bytes + plan.least_peak_bytes) // 2).plan


def check(loop: Loop) -> None:
    reference = eager(zoo.build(loop.case.name, large=True), None, LOOSE).record(2)
    assert equal(loop.record(2), reference)
    assert loop.plan.resident_bytes + measure_peak(loop.step) == loop.plan.peak_bytes


def hits(tensors: tuple[Tensor, ...], pattern: str) -> bool:
    """The pattern matches one that is of this module, or of one just below."""
    modules, _, ops = pattern.partition("::")
    return any(
        fnmatchcase(t.op, ops or "aten*")  # and not the state of a generator
        and (fnmatchcase(t.module, modules) or fnmatchcase(t.module, f"{modules}.*"))
        for t in tensors
    )


@pytest.mark.parametrize(
    ("name", "save", "recompute"),
    [
        ("mlp", "[18]*::aten.addmm*", "[37]"),
        pytest.param(
            "gpt2",
            "transformer.h.*.attn::aten.mul*",
            "transformer.h.1.mlp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "resnet",
            "*.layers.0.layer.2::aten.convolution*",
            "resnet.encoder.stages.1.layers.1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_keeps_to_both_kinds_and_trains_as_eager(
    name: str, save: str, recompute: str
) -> None:
    free = middle(name)
    loop = demanding(name, free.budget_bytes, (save,), (recompute,))
    plan = loop.plan
    assert hits(free.recomputed, save)
    assert not hits(plan.recomputed, save)
    assert hits(free.saved, recompute)
    assert not hits(plan.saved, recompute)
    assert plan.peak_bytes <= free.budget_bytes
    check(loop)
    assert f"save '{save}', recompute '{recompute}'" in vars(loop.model)["remat"].explain()
    assert Plan.from_json(plan.to_json()) == plan


def test_what_must_be_recomputed_is_so_under_any_budget() -> None:
    loop = demanding("mlp", HUGE, recompute=("[0-9]", "1[0-4]"))
    assert not loop.plan.is_eager
    assert loop.plan.overhead > 0
    assert {t.module for t in loop.plan.saved if t.op != "generator_state"} == {"15"}
    check(loop)


@pytest.mark.parametrize(
    ("save", "recompute", "said"),
    [
        (("layer.*",), (), "save 'layer.*' matches no op.*the nearest are"),
        (("0::aten.mm.default",), (), "The ops in '0' that are nearest .* are aten.addmm.default"),
        (
            (),
            ("::aten.t.default",),
            "recompute '::aten.t.default' matches no op of forward that writes",
        ),
        (("1",), ("::*norm*",), "recompute '::.norm.' matches .*, but save '1' matches it too"),
        ((), ("transformer.h.0::*",), "No module that runs ops matches 'transformer.h.0'"),
    ],
)
def test_a_pattern_that_cannot_be_kept_is_named(
    save: tuple[str, ...], recompute: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PatternError, match=said):
        demanding("mlp", HUGE, save, recompute)


class Best(nn.Module):
    """Goes on with the three largest features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest: torch.Tensor = self.layer(x).topk(3).values
        return largest.sum()


def test_what_may_not_be_repeated_cannot_be_demanded() -> None:
    with pytest.raises(PatternError, match=r"topk.* cannot be repeated: .* chooses indices"):
        optimize_checkpoints(Best(), "1GB", (torch.ones(4, 8),), recompute=("::aten.topk*",))


def test_the_pattern_that_makes_a_budget_infeasible_is_named() -> None:
    least = demanding("mlp", HUGE).plan.least_peak_bytes
    with pytest.raises(
        InfeasibleBudgetError, match=r"In the way: save '::\*'; without it"
    ) as refused:
        demanding("mlp", least, ("::*",), ())
    assert refused.value.least_peak_bytes > least
    with pytest.raises(InfeasibleBudgetError) as refused:
        demanding("mlp", least // 2, ("::*",), ())
    assert "In the way" not in str(refused.value)


@pytest.mark.parametrize(
    ("save", "raised"), [("layers.*", TypeError), ((3,), TypeError), (("",), ValueError)]
)
def test_a_pattern_that_is_none_is_refused(save: object, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"save (must be|holds)"):
        demanding("mlp", HUGE, save)  # type: ignore[arg-type]
