"""One plan at many sizes: it runs wherever it holds, and is never exceeded without a word."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import sympy
import torch
import zoo
from torch import Tensor, nn
from training import Loop, MakeOptimizer, equal

from remat import (
    GuardError,
    InfeasibleBudgetError,
    Plan,
    StepProtocol,
    measure_peak,
    optimize_checkpoints,
)
from remat.passes import profile
from remat.sizes import trace_at

LOOSE = StepProtocol(outputs_held=False)
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
Sizes = tuple[int, int]
"""Batch and sequence; what has no sequence ignores it."""
LANGUAGE = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}
IMAGE = {name: {0: "batch"} for name in ("pixel_values", "labels")}
DYNAMIC: Mapping[str, Any] = {
    "gpt2": LANGUAGE,
    "llama": LANGUAGE,
    "mixtral": LANGUAGE,
    "bert": LANGUAGE | {"attention_mask": {0: "batch", 1: "seq"}},
    "t5": {"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "target"}},
    "vit": IMAGE,
    "resnet": IMAGE,
    "whisper": {"input_features": {0: "batch"}, "labels": {0: "batch", 1: "seq"}},
    "dlrm": {"dense": {0: "batch"}, "indices": {1: "lookups"}, "offsets": {1: "batch"}},
    "mlp": {"input": {0: "batch"}},
    "transformer": {"src": {0: "batch", 1: "seq"}, "tgt": {0: "batch", 1: "target"}},
}
SIZES: Mapping[str, list[Sizes]] = {
    "vit": [(8, 0), (3, 0), (13, 0), (5, 0), (20, 0)],
    "resnet": [(5, 0), (3, 0), (8, 0), (2, 0), (11, 0)],  # from 16 on, other kernels run
    "whisper": [(3, 16), (2, 9), (4, 24), (5, 12), (2, 30)],
    "dlrm": [(40, 6), (17, 3), (64, 0), (9, 20), (100, 11)],
    "mlp": [(40, 0), (17, 0), (64, 0), (3, 0), (100, 0)],
}
USUAL: list[Sizes] = [(3, 24), (2, 16), (4, 31), (5, 9), (2, 40)]


def ids(*shape: int) -> Tensor:
    return torch.randint(2, zoo.VOCABULARY, shape)


def arguments(name: str, batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One batch of a size."""
    torch.manual_seed(1000 * batch + seq)
    if name in ("gpt2", "llama", "mixtral"):
        tokens = ids(batch, seq)
        return (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
    if name == "bert":
        tokens, mask = ids(batch, seq), torch.ones(batch, seq, dtype=torch.long)
        mask[0, seq // 2 :] = 0
        return (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.flip(0)}
    if name == "t5":
        labels = ids(batch, seq * 3 // 4)
        return (), {"input_ids": ids(batch, seq), "labels": labels, "use_cache": False}
    if name in ("vit", "resnet"):
        side = 32 if name == "vit" else 64
        images = torch.randn(batch, 3, side, side)
        return (), {"pixel_values": images, "labels": torch.arange(batch) % 10}
    if name == "whisper":
        features = torch.randn(batch, 16, 64)
        return (), {"input_features": features, "labels": ids(batch, seq), "use_cache": False}
    if name == "dlrm":
        offsets = torch.arange(0, 2 * batch, 2).repeat(4, 1)
        indices = torch.randint(100, (4, 2 * batch + seq))
        return (), {"dense": torch.randn(batch, 13), "indices": indices, "offsets": offsets}
    if name == "mlp":
        return (torch.randn(batch, 64),), {}
    return (torch.randn(batch, seq, 64), torch.randn(batch, seq + 3, 64)), {}


def at(case: zoo.Case, model: nn.Module, sizes: Sizes) -> zoo.Case:
    args, kwargs = arguments(case.name, *sizes)
    return zoo.Case(case.name, model, args, kwargs, case.loss_fn)


def trained(case: zoo.Case) -> list[Tensor]:
    """Loss, gradients, buffers and the random state of one step that changes no parameter."""
    case.model.zero_grad()
    torch.manual_seed(7)
    loss = case.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
    case.model.zero_grad()
    buffers = [buffer.clone() for buffer in case.model.buffers()]
    return [loss.detach(), *gradients, *buffers, torch.get_rng_state()]


def dropin(case: zoo.Case, budget: str, **options: Any) -> Any:
    options = {"dynamic": DYNAMIC[case.name], "protocol": LOOSE, "gap": 1.0} | options
    return optimize_checkpoints(
        case.model, budget, case.args, case.kwargs, loss_fn=case.loss_fn, **options
    )


def at_names(formula: sympy.Expr, sizes: Mapping[str, int]) -> int:
    return int(formula.subs({s: sizes[str(s)] for s in formula.free_symbols}))


def sizes_of(case: zoo.Case) -> dict[str, int]:
    given = {**dict(zip(DYNAMIC[case.name], case.args, strict=False)), **case.kwargs}
    return {
        name: given[argument].shape[dim]
        for argument, dims in DYNAMIC[case.name].items()
        for dim, name in dims.items()
    }


def check_sizes(name: str, make: MakeOptimizer, part: float, sizes: list[Sizes]) -> None:
    """One plan, made at the first size, trains as eager does at all, in the bytes of its formula."""
    base = zoo.build(name)
    case = at(base, base.model, sizes[0])
    assert make is not None
    optimizer = make(list(case.model.parameters()))
    loose = dropin(case, "1000GB", dynamic=None, optimizer=optimizer).remat.plan
    low, high = loose.least_peak_bytes, loose.baseline_peak_bytes
    model = dropin(case, f"{int(low + part * (high - low))}B", optimizer=optimizer)
    plan, stats = model.remat.plan, model.remat.stats
    assert not plan.is_eager
    assert not plan.fixed
    assert Plan.from_json(plan.to_json()) == plan
    object.__setattr__(plan, "budget_bytes", 10**12)  # so that it runs at larger sizes, too
    twin = zoo.build(name)
    for size in sizes:
        here = at(base, model, size)
        twin.model.load_state_dict(model.state_dict())
        expected = trained(at(base, twin.model, size))
        assert equal(trained(here), expected), size
        peak = model.remat.peak_at(**sizes_of(here))
        resident = profile(trace_at(model.remat.planned, sizes_of(here))).resident
        assert resident + measure_peak(Loop(here, model, optimizer, LOOSE).step) == peak
        assert at_names(plan.peak, sizes_of(here)) == peak
    assert (stats.plans, dict(stats.fallbacks), dict(stats.replanned)) == (1, {}, {})


@pytest.mark.filterwarnings("ignore:remat. planned for outputs_held")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "resnet"])
def test_one_plan_trains_as_eager_at_other_sizes_in_the_bytes_of_its_formula(name: str) -> None:
    check_sizes(name, OPTIMIZERS["AdamW"], 0.5, SIZES[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:remat. planned for outputs_held")
@pytest.mark.parametrize("part", [0.5, 0.15])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_every_model_is_predicted_at_five_sizes(name: str, optimizer: str, part: float) -> None:
    check_sizes(name, OPTIMIZERS[optimizer], part, SIZES.get(name, USUAL))


class Net(nn.Module):
    """Dropout, and a block whose size is a square; fixes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).tanh())
        scores = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        loss: Tensor = self.last((scores @ hidden).sin().exp()).sin().pow(2).mean()
        return loss


TRAIN: dict[str, Any] = {
    "dynamic": {"x": {0: "batch", 1: "seq"}},
    "optimizer": "SGD",
    "gap": 1.0,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().train()


def step(model: nn.Module, batch: int, seq: int) -> list[Tensor]:
    x = torch.randn(batch, seq, 16, generator=torch.Generator().manual_seed(batch + seq))
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return [*found, torch.get_rng_state()]


@functools.cache
def loose(batch: int, seq: int) -> Plan:
    """The plan under an ample budget, for these sizes only."""
    x = torch.randn(batch, seq, 16)
    model: Any = optimize_checkpoints(net(), "1GB", (x,), optimizer="SGD", gap=1.0)
    plan = model.remat.plan
    assert isinstance(plan, Plan)
    return plan


def capped(batch: int, seq: int, **options: Any) -> Any:
    """A drop-in between its least peak and eager's."""
    plan = loose(batch, seq)
    budget = (plan.least_peak_bytes + plan.baseline_peak_bytes) // 2
    x = torch.randn(batch, seq, 16)
    return optimize_checkpoints(net(), f"{budget}B", (x,), **TRAIN, **options)


def test_smaller_batches_run_the_same_plan() -> None:
    model = capped(8, 32)
    for batch, seq in ((8, 32), (3, 32), (5, 17), (3, 32)):
        assert equal(step(model, batch, seq), step(net(), batch, seq))
    assert (model.remat.stats.planned, model.remat.stats.plans) == (4, 1)
    assert not model.remat.stats.fallbacks


def test_a_size_over_the_budget_is_planned_again_and_an_impossible_one_raises() -> None:
    model = capped(8, 32)
    budget = model.remat.plan.budget_bytes
    assert model.remat.peak_at(batch=9, seq=32) > budget
    with pytest.warns(UserWarning, match=r"another plan: at batch = 9, seq = 32 the peak would"):
        assert equal(step(model, 9, 32), step(net(), 9, 32))
    assert model.remat.plan.peak_bytes <= budget
    with pytest.raises(InfeasibleBudgetError):
        step(model, 64, 64)
    assert equal(step(model, 8, 32), step(net(), 8, 32))
    assert (model.remat.stats.plans, sum(model.remat.stats.replanned.values())) == (2, 1)


def test_a_size_over_the_budget_is_refused_on_demand() -> None:
    model = capped(8, 32, on_new_size="refuse")
    with pytest.raises(GuardError, match="at batch = 9, seq = 32 the peak would be"):
        step(model, 9, 32)
    assert equal(step(model, 7, 32), step(net(), 7, 32))


@pytest.mark.slow
def test_a_size_of_one_and_a_sliced_batch_get_plans_of_their_own() -> None:
    model = capped(8, 32)
    with pytest.warns(UserWarning, match="the graph holds for batch >= 2 only"):
        assert equal(step(model, 1, 32), step(net(), 1, 32))
    assert model.remat.plan.fixed == {"batch": 1}
    model(torch.randn(8, 40, 16)[:, :32]).backward()
    assert model.remat.stats.plans == 3
    assert not model.remat.stats.fallbacks


@pytest.mark.slow
def test_the_model_as_it_is_runs_while_its_formula_is_under_the_budget() -> None:
    x, peak = torch.randn(4, 16, 16), loose(4, 16).peak_bytes
    model: Any = optimize_checkpoints(net(), f"{peak}B", (x,), **TRAIN)
    assert model.remat.plan.is_eager
    assert at_names(model.remat.plan.peak, {"batch": 4, "seq": 16}) == peak
    there = loose(6, 19).peak_bytes
    assert model.remat.peak_at(batch=6, seq=19) == there
    assert at_names(model.remat.plan.peak, {"batch": 6, "seq": 19}) == there
    assert equal(step(model, 3, 9), step(net(), 3, 9))
    assert model.remat.stats.plans == 1
    with pytest.warns(UserWarning, match="made another plan"):
        assert equal(step(model, 5, 16), step(net(), 5, 16))
    assert not model.remat.plan.is_eager


def test_a_plan_is_made_at_stated_sizes() -> None:
    x = torch.randn(2, 8, 16)
    model: Any = optimize_checkpoints(net(), "1GB", (x,), plan_at={"batch": 8}, **TRAIN)
    assert model.remat.plan.sizes == {"batch": 8, "seq": 8}
    assert model.remat.plan.peak_bytes == loose(8, 8).peak_bytes
    with pytest.raises(ValueError, match="plan_at names 'bath', which dynamic does not"):
        optimize_checkpoints(net(), "1GB", (x,), plan_at={"bath": 8}, **TRAIN)


class Fixing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.shape[0] == 4 else 1)


def test_a_size_that_the_model_compares_with_a_number_is_fixed_and_others_are_planned() -> None:
    model: Any = Fixing().train()
    with pytest.warns(UserWarning, match="the model needs batch = 4 as numbers"):
        model = optimize_checkpoints(model, "1GB", (torch.randn(4, 8, 16),), **TRAIN)
    assert model.remat.plan.fixed == {"batch": 4}
    assert {str(s) for s in model.remat.plan.peak.free_symbols} == {"seq"}
    model(torch.randn(4, 12, 16)).backward()
    assert model.remat.stats.plans == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(5, 12, 16)).backward()
    assert model.remat.stats.plans == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": {}}, "dynamic names at least one dimension"),
        ({"dynamic": {"y": {0: "batch"}}}, "'y', which is no argument of the model's forward"),
        ({"dynamic": {"x": {-1: "batch"}}}, "counted from 0"),
        ({"dynamic": {"x": {0: "batch size"}}}, "names, such as 'batch'"),
        ({"dynamic": {"x": {5: "batch"}}}, "x has 3 dimensions, and dynamic names 5"),
        ({"dynamic": {"x": {0: "n", 1: "n"}}}, "n is 2 in x and 8 in x"),
        ({"on_new_size": "run"}, "on_new_size is 'replan' or 'refuse'"),
    ],
)
def test_what_cannot_be_meant_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize_checkpoints(net(), "1GB", (torch.randn(2, 8, 16),), **options)
