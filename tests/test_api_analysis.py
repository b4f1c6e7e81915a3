"""`analyze`: formulas and figures equal to what the allocator measures, over whole steps."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sympy
import torch
import zoo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat import UnsupportedGraphError, measure_peak

Optimizers = Callable[[Any], torch.optim.Optimizer]
ADAMW: Optimizers = torch.optim.AdamW
MOMENTUM: Optimizers = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)  # noqa: E731
TEXT = {0: "batch", 1: "seq"}
BATCH_NORM = {"aten._native_batch_norm_legit.default", "aten.native_batch_norm.default"}
"""Takes a constant, which is less if the batch has no more rows than there are threads."""
DYNAMIC: Mapping[str, Mapping[str, Mapping[int, str]]] = {
    "gpt2": {"input_ids": TEXT, "labels": TEXT},
    "bert": {"input_ids": TEXT, "labels": TEXT, "attention_mask": TEXT},
    "llama": {"input_ids": TEXT, "labels": TEXT},
    "mixtral": {"input_ids": TEXT, "labels": TEXT},
    "t5": {"input_ids": {0: "batch", 1: "source"}, "labels": {0: "batch", 1: "target"}},
    "vit": {"pixel_values": {0: "batch"}, "labels": {0: "batch"}},
    "resnet": {"pixel_values": {0: "batch"}, "labels": {0: "batch"}},
    "whisper": {"input_features": {0: "batch"}, "labels": {0: "batch", 1: "target"}},
    "unet2d": {"sample": {0: "batch"}, "timestep": {0: "batch"}},
    "vae": {"sample": {0: "batch"}},
    "mlp": {"input": {0: "batch"}},
}


def loss_of(case: zoo.Case) -> Callable[[Any], Tensor]:
    return case.loss_fn or (lambda output: output.loss)


def analysed(case: zoo.Case, optimizer: torch.optim.Optimizer | None) -> remat.MemoryReport:
    return remat.analyze(
        case.model,
        case.args,
        case.kwargs,
        loss_fn=loss_of(case),
        optimizer=optimizer,
        dynamic=DYNAMIC[case.name],
    )


def resized(case: zoo.Case, sizes: Mapping[str, int]) -> tuple[list[Any], dict[str, Any]]:
    def brought(tensor: Any, dims: Mapping[int, str]) -> Any:
        for dim, name in dims.items():
            picks = torch.arange(sizes[name]) % tensor.shape[dim]
            tensor = tensor.index_select(dim, picks)
        return tensor

    dynamic = DYNAMIC[case.name]
    args = [brought(a, next(iter(dynamic.values()))) for a in case.args]
    kwargs = {k: brought(v, dynamic[k]) if k in dynamic else v for k, v in case.kwargs.items()}
    return args, kwargs


def measured(case: zoo.Case, make: Optimizers, sizes: Mapping[str, int], *, first: bool) -> int:
    """Measured peak of a real step above what was there before it."""
    args, kwargs = resized(case, sizes)
    optimizer = make(case.model.parameters())
    loss_fn = loss_of(case)

    def step() -> None:
        output = case.model(*args, **kwargs)
        loss = loss_fn(output)
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        case.model.zero_grad()

    if first:
        torch.rand(()), loss_fn(case.model(*args, **kwargs))  # kernels' one-off allocations
    return measure_peak(step, warmup=0 if first else 2)


def other_sizes(sizes: Mapping[str, int], count: int) -> list[dict[str, Any]]:
    return [{name: size + k * (k + 1) for name, size in sizes.items()} for k in range(count)]


FAST = ["gpt2", "mlp"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in DYNAMIC if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.parametrize(
    "make",
    [ADAMW, pytest.param(MOMENTUM, marks=pytest.mark.slow)],
    ids=["adamw", "momentum"],
)
def test_peaks_are_those_of_the_allocator(name: str, make: Optimizers) -> None:
    case = zoo.build(name)
    report = analysed(case, make(case.model.parameters()))
    for sizes in other_sizes(report.sizes, 5 if name not in FAST else 3):
        before = report.resident_at(**sizes)
        assert report.peak_at(step="steady", **sizes) - before == measured(
            case, make, sizes, first=False
        )
        first = report.at(step="first", **sizes)
        assert first.peak - first.resident == measured(case, make, sizes, first=True)


@pytest.mark.parametrize(
    ("name", "reserved"),
    [pytest.param("gpt2", set(), marks=pytest.mark.slow), ("mlp", BATCH_NORM)],
)
def test_the_formula_is_the_exact_figure_in_its_domain(name: str, reserved: set[str]) -> None:
    case = zoo.build(name)
    report = analysed(case, ADAMW(case.model.parameters()))
    assert set(report.scratch.reserved) <= reserved
    assert not report.scratch.unknown
    for sizes in other_sizes(report.sizes, 4):
        symbols = {sympy.Symbol(n, positive=True, integer=True): v for n, v in sizes.items()}
        assert int(report.peak.subs(symbols)) == report.peak_at(**sizes)
        assert int(report.resident.subs(symbols)) == report.resident_at(**sizes)


@pytest.mark.slow
def test_a_size_of_one_has_formulas_of_its_own() -> None:
    case = zoo.build("gpt2")
    report = analysed(case, ADAMW(case.model.parameters()))
    sizes: dict[str, Any] = {"batch": 1, "seq": 9}
    before = report.resident_at(**sizes)
    assert report.peak_at(step="steady", **sizes) - before == measured(
        case, ADAMW, sizes, first=False
    )


@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama", "vit", "bert"))],
)
def test_the_largest_that_fits_fits_and_the_next_does_not(name: str) -> None:
    case = zoo.build(name)
    report = analysed(case, ADAMW(case.model.parameters()))
    budget = 2 * report.peak_at()
    found = report.largest("batch", f"{budget}B")
    for batch, fits in ((found, True), (found + 1, False)):
        sizes = {**report.sizes, "batch": batch}
        peak = report.resident_at(**sizes) + measured(case, ADAMW, sizes, first=False)
        assert (peak <= budget) is fits


@pytest.mark.slow
def test_recomputation_fits_a_larger_batch() -> None:
    case = zoo.build("mlp")
    report = analysed(case, ADAMW(case.model.parameters()))
    budget = f"{2 * report.peak_at(batch=300)}B"
    assert report.largest("batch", budget, checkpointing=True) > report.largest("batch", budget)


def small() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(8, 64)


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def test_the_ledger_adds_up() -> None:
    model, x = small()
    report = remat.analyze(model, (x,), loss_fn=mean_square, optimizer="AdamW")
    steady = report.at()
    for phase in steady.phases:
        assert sum(phase.by_role.values()) == phase.bytes == steady.curve[phase.instant]
        assert sum(holder.bytes for holder in phase.holders) == phase.bytes
    assert max(steady.curve) == steady.peak


def test_accumulation_clipping_and_scaling_are_what_the_allocator_measures() -> None:
    model, x = small()
    optimizer = torch.optim.AdamW(model.parameters())
    report = remat.analyze(
        model,
        (x,),
        loss_fn=mean_square,
        optimizer=optimizer,
        accumulation_steps=3,
        clip_gradients=True,
    )

    def step() -> None:
        for _ in range(3):
            loss = mean_square(model(x))
            (loss / 3).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    assert report.peak_at(step="steady") - report.resident_at() == measure_peak(step, warmup=2)


def test_autocast_is_what_the_allocator_measures() -> None:
    model, x = small()
    optimizer = torch.optim.AdamW(model.parameters())
    report = remat.analyze(
        model, (x,), loss_fn=mean_square, optimizer=optimizer, precision="bf16-mixed"
    )

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_square(model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    assert report.peak_at(step="steady") - report.resident_at() == measure_peak(step, warmup=2)


def test_a_type_for_the_model_halves_what_is_resident() -> None:
    model, x = small()
    full, half = (
        remat.analyze(model, (x,), loss_fn=mean_square, optimizer="SGD", precision=precision)
        for precision in ("fp32", "bf16")
    )
    assert full.resident_at() == 2 * half.resident_at()
    assert next(model.parameters()).dtype == torch.float32


def test_a_gpu_that_is_not_at_hand() -> None:
    model, x = small()
    report = remat.analyze(
        model, (x,), loss_fn=mean_square, optimizer="AdamW", device="cuda:A100-80GB"
    )
    count = sum(p.numel() for p in model.parameters())
    workspaces = 2 * 8_519_680
    assert report.resident_at() >= 12 * count + workspaces
    assert report.peak_at() % 512 == 0
    use = report.reserved_at()
    assert report.peak_at() <= use.peak_allocated <= use.peak_reserved
    low, high = report.nvidia_smi_at()
    assert use.peak_reserved < low <= high
    assert "fits" in report.diagnosis("80%")


@pytest.mark.parametrize(
    ("name", "state"), [("adam8bit", 2 * (1 + 4 / 256)), ("lion8bit", 1 + 4 / 256), ("lion", 4)]
)
def test_optimizers_beside_torch_by_name(name: str, state: float) -> None:
    model = nn.Linear(256, 256, bias=False)
    report = remat.analyze(model, (torch.randn(2, 256),), loss_fn=mean_square, optimizer=name)
    sizes = report.at().phases[-1].by_role
    assert sizes[remat.ir.Role.OPTIMIZER_STATE] == int(state * 256 * 256)


def test_the_json_has_the_figures() -> None:
    model, x = small()
    report = remat.analyze(model, (x,), loss_fn=mean_square, optimizer="AdamW")
    data = json.loads(report.to_json(batch=5))
    assert data["schema"] == "remat.memory_report/1"
    assert data["steady"]["peak"] == report.peak_at(step="steady", batch=5)
    assert max(data["steady"]["curve"]) == data["steady"]["peak"]
    assert "batch" in data["formulas"]["peak"]


def test_names_that_become_numbers_are_reported() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for t in range(x.shape[1]):
                x = x + self.cell(x[:, t : t + 1])
            return x

    report = remat.analyze(
        Loops(),
        (torch.randn(4, 5, 8),),
        loss_fn=mean_square,
        dynamic={"x": {0: "batch", 1: "time"}},
    )
    assert [(each.name, each.value) for each in report.fixed] == [("time", 5)]
    assert "time is 5" in str(report)
    assert report.peak_at(batch=4, time=7) > report.peak_at(batch=4, time=5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dynamic": {"y": {0: "batch"}}}, ValueError, "names 'y', which is no argument"),
        ({"dynamic": {"input": {7: "batch"}}}, ValueError, "no dimension 7"),
        ({"device": "cuda:nothing"}, ValueError, "there are"),
        ({"precision": "int3"}, ValueError, "bf16-mixed"),
        ({"optimizer": "lbfgs"}, ValueError, "closure"),
        ({"accumulation_steps": 0}, ValueError, "at least 1"),
    ],
)
def test_bad_options_say_what_to_do(options: Any, error: type[Exception], message: str) -> None:
    model, x = small()
    with pytest.raises(error, match=message):
        remat.analyze(model, (x,), **{"loss_fn": mean_square, **options})


def test_unknown_sizes_and_values_are_refused() -> None:
    model, x = small()
    report = remat.analyze(model, (x,), loss_fn=mean_square)
    with pytest.raises(ValueError, match="the sizes are: batch"):
        report.peak_at(seq=3)
    with pytest.raises(ValueError, match="positive integer"):
        report.peak_at(batch=0)

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(UnsupportedGraphError, match="depends on values"):
        remat.analyze(Branches(), (x.requires_grad_(),), loss_fn=mean_square, optimizer=None)


def test_a_step_that_is_a_function() -> None:
    """It copies modules, and other models are alive in the process."""
    other = nn.Linear(16, 16)

    def build(batch: int) -> Callable[[], None]:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(batch, 8, 16)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    report = remat.analyze_step(build, {"batch": 4})
    assert report.peak_at(step="steady") - report.resident_at() == measure_peak(build(4), warmup=2)
    assert [phase.phase for phase in report.at().phases] == list(remat.ir.Phase)
    assert report.at().phases[-1].by_role[remat.ir.Role.OPTIMIZER_STATE] > 0
    assert other.weight.grad is None


def test_sizes_that_must_be_equal_are_in_the_domain() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = self.linear(x) + self.linear(y)
            return result

    report = remat.analyze(
        Sum(),
        (torch.randn(6, 4), torch.randn(6, 4)),
        loss_fn=mean_square,
        dynamic={"x": {0: "a"}, "y": {0: "b"}},
    )
    assert "Eq(" in " ".join(report.domain)
    with pytest.raises(RuntimeError, match="size"):
        report.peak_at(a=100, b=7)


def test_a_tensor_in_the_loss_keeps_its_sizes() -> None:
    model, x = small()
    target = torch.randn(8, 64)
    report = remat.analyze(
        model, (x,), loss_fn=lambda y: (y - target).pow(2).mean(), optimizer="SGD", dynamic={}
    )
    assert not report.peak.free_symbols
    assert report.peak_at() == int(report.peak)


def test_dropout_holds_as_much_with_symbols_as_without() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x), 0.1).mean((1, 2))

    model, x = Drops(), torch.randn(4, 64, 32)
    fixed, symbolic = (
        remat.analyze(model, (x,), loss_fn=torch.sum, optimizer="SGD", dynamic=dynamic)
        for dynamic in ({}, {"x": {0: "batch"}})
    )
    assert fixed.peak_at() == symbolic.peak_at(batch=4)


def test_an_optimizer_around_another_is_refused_and_left_alone() -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    model, x = small()
    base = torch.optim.AdamW(model.parameters())
    mean_square(model(x)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedGraphError, match="'base'"):
        remat.analyze(model, (x,), loss_fn=mean_square, optimizer=Outer(base))
    assert not base.state


def test_below_the_smallest_nothing_fits() -> None:
    model, x = small()
    report = remat.analyze(model, (x,), loss_fn=mean_square, optimizer="AdamW")
    assert report.largest("batch", "10kB") == 0
    assert "does not fit" in report.diagnosis("10kB")


def test_plans_refuse_what_they_do_not_take_into_account() -> None:
    model, x = small()
    report = remat.analyze(model, (x,), loss_fn=mean_square, optimizer="AdamW", precision="bf16")
    with pytest.raises(ValueError, match="precision"):
        report.frontier(2)


def test_source_lines_are_the_users() -> None:
    model, x = small()
    report = remat.analyze(
        nn.Sequential(model, nn.Dropout(0.5)), (x,), loss_fn=mean_square, device="a100-80gb"
    )
    found = {holder.source for phase in report.at().phases for holder in phase.holders}
    assert not any("kernels" in source for source in found)


def test_a_size_that_the_loss_fixes_is_a_number_in_scratch_too() -> None:
    """Forward has used the symbol before a target of two rows says that it is 2."""
    model = nn.Sequential(nn.Conv2d(3, 16, 7, padding=3), nn.AvgPool2d(8), nn.Conv2d(16, 3, 1))
    x, target = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 8, 8)
    report = remat.analyze(
        model, (x,), loss_fn=lambda y: nn.functional.mse_loss(y, target), optimizer="AdamW"
    )
    assert [each.name for each in report.fixed] == ["batch"]
    assert not report.scratch.unknown
    assert report.peak == report.peak_at()


def test_one_row_without_data_for_a_gpu() -> None:
    with FakeTensorMode():
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(1, 8)
    report = remat.analyze(model, (x,), loss_fn=mean_square, optimizer="AdamW", device="a100-80gb")
    assert report.sizes == {"batch": 1}
    assert report.peak_at(batch=1) <= report.peak_at(batch=1000)
