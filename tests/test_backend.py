"""The `torch.compile` backend: eager's numbers to the bit, the plan's peak to the byte."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional

from remat import InfeasibleBudgetError, StepProtocol, optimize_checkpoints
from remat.backend import Compiled, compiled
from remat.measure import measure_peak

_earlier: list[Compiled] = []
FAST = {"time_limit_s": 1.0, "gap": 0.5}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    _earlier[:] = compiled()  # Dynamo keeps some after a reset
    yield
    _earlier.clear()
    torch._dynamo.reset()


class Net(nn.Module):
    """Batch norm, dropout, and activations that exceed the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(functional.gelu(self.norm(self.first(x))))
        hidden = functional.gelu(self.second(hidden)).sin()
        loss: Tensor = self.last(hidden).square().mean()
        return loss


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def options(budget: str, **more: Any) -> dict[str, Any]:
    return {"budget_gb": budget, "optimizer": "AdamW", **FAST, **more}


def record(
    model: nn.Module, losses: Callable[[], Iterable[Tensor]], steps: int = 2
) -> list[Tensor]:
    """All that some AdamW steps compute; several losses are several backwards of one step."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(7)
    seen: list[Tensor] = []
    for _ in range(steps):
        for loss in losses():
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.detach())
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [t.clone() for t in (*kept, *model.buffers(), torch.get_rng_state())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def graphs() -> list[Compiled]:
    """Those of this test."""
    return [graph for graph in compiled() if graph not in _earlier]


def only() -> Compiled:
    (graph,) = graphs()
    return graph


def case_of(name: str) -> zoo.Case:
    case = zoo.build(name, large=True)
    if name == "gpt2":
        vars(case.model)["loss_type"] = "ForCausalLM"  # else it logs, which breaks Dynamo's graph
    return case


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("mlp", "1.3MB"),
        pytest.param("gpt2", "8MB", marks=pytest.mark.slow),
        pytest.param("bert", "6MB", marks=pytest.mark.slow),
        pytest.param("transformer", "6MB", marks=pytest.mark.slow),
    ],
)
def test_steps_are_eagers_to_the_bit_and_peak_where_the_plan_says(name: str, budget: str) -> None:
    case = case_of(name)
    expected = record(case.model, lambda: [case.loss()])
    case = case_of(name)
    loss = torch.compile(case.loss, backend="remat", options=options(budget), fullgraph=True)
    assert equal(record(case.model, lambda: [loss()]), expected)
    graph = only()
    plan = graph.plan
    assert plan is not None
    assert plan.recomputed
    assert (graph.plans, graph.calls) == (1, 2)

    optimizer = torch.optim.AdamW(case.model.parameters())

    def step() -> None:
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    measured = measure_peak(step, warmup=2) + plan.resident_bytes
    assert measured <= plan.budget_bytes
    assert measured == plan.peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler: no g++ here"
)
def test_inductor_runs_the_planned_graphs_and_saves_what_the_plan_saves() -> None:
    model, x = net(), batch()
    expected = record(model, lambda: [model(x)])
    model = net()
    step = torch.compile(
        model, backend="remat", options=options("250kB", inductor=True), fullgraph=True
    )
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def losses() -> Iterator[Tensor]:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = step(x)
        yield loss

    found = record(model, losses)
    random = [t for t in found if t.dtype == torch.uint8]
    assert equal(random, [t for t in expected if t.dtype == torch.uint8])
    # Inductor fuses and so rounds otherwise; the masks are the same, or this would be off by far.
    for mine, eagers in zip(found[:8], expected[:8], strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-6)
    plan = only().plan
    assert plan is not None
    assert plan.recomputed
    activations = {tensor.bytes for tensor in plan.saved}
    parameters = {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)
    }
    saved = [t for t in kept if t.untyped_storage().data_ptr() not in parameters]
    assert {t.nbytes for t in saved if t.numel() > 1} <= activations
    assert len(saved) <= len(plan.saved)


def test_no_import_is_needed() -> None:
    code = """
import sys, torch
from torch import nn
assert "remat" not in sys.modules
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 1))
options = {"budget_gb": "170kB", "time_limit_s": 1.0}
step = torch.compile(model, backend="remat", options=options, fullgraph=True)
step(torch.randn(256, 8)).sum().backward()
from remat.backend import compiled
plan = compiled()[0].plan
print(plan.budget_bytes, len(plan.recomputed) > 0, model[0].weight.grad is not None)
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stdout == "170000 True True\n", run.stderr


def test_one_graph_serves_other_modules_with_their_own_parameters() -> None:
    def losses(models: nn.ModuleList) -> list[Tensor]:
        return [model(batch()) for model in models]

    models = nn.ModuleList([net(), net()])
    with torch.no_grad():
        models[1].first.weight.mul_(2)  # type: ignore[operator, union-attr]
    state = {name: value.clone() for name, value in models.state_dict().items()}
    expected = record(models, lambda: losses(models))
    models.load_state_dict(state)
    protocol = StepProtocol(gradients_resident=True, forwards_outstanding=2)
    for model in models:
        model.compile(backend="remat", options=options("400kB", protocol=protocol))
    assert equal(record(models, lambda: losses(models)), expected)
    graph = only()
    assert graph.calls == 4
    assert graph.plan is not None
    assert graph.plan.recomputed


def test_each_size_of_a_graph_with_symbolic_sizes_has_a_plan() -> None:
    rows = (256, 200, 120, 256, 120)

    def losses(model: nn.Module) -> Iterator[Tensor]:
        return (model(batch(n)) for n in rows)

    model = net()
    expected = record(model, lambda: losses(model), steps=1)
    model = net()
    protocol = StepProtocol(gradients_resident=True)
    model.compile(backend="remat", options=options("250kB", protocol=protocol), fullgraph=True)
    assert equal(record(model, lambda: losses(model), steps=1), expected)
    static, symbolic = graphs()
    assert (static.plans, static.calls) == (1, 1)
    assert (symbolic.plans, symbolic.calls) == (3, 4)
    assert static.plan is not None
    assert static.plan.recomputed


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(functional.gelu(self.norm(self.first(x))))
        torch._dynamo.graph_break()
        hidden = functional.gelu(self.second(hidden)).sin()
        loss: Tensor = self.last(hidden).square().mean()
        return loss


def test_a_graph_break_is_named_and_computes_what_eager_does() -> None:
    torch.manual_seed(0)
    model = Broken()
    expected = record(model, lambda: [model(batch())])
    torch.manual_seed(0)
    model = Broken()
    model.compile(backend="remat", options=options("190kB"))
    line = Broken.forward.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match=rf"cuts the step in two at \S*test_backend.py:{line}"):
        assert equal(record(model, lambda: [model(batch())]), expected)
    assert [graph.calls for graph in graphs()] == [2, 2]
    assert [graph.plan is None or graph.plan.is_eager for graph in graphs()] == [False, False]


def test_graphs_that_hold_memory_at_the_same_time_say_so() -> None:
    model, other = net(), net()
    model.compile(backend="remat", options=options("250kB"))
    step = torch.compile(lambda x: other(x) * 1, backend="remat", options=options("250kB"))
    waiting = model(batch())
    with pytest.warns(UserWarning, match=r"1 other compiled graphs wait .* they hold \d+\.\d+ kB"):
        step(batch()).backward()
    waiting.backward()


def test_calls_without_gradients_run_the_graph_as_it_is() -> None:
    model = net()
    plain = net().eval()
    model.compile(backend="remat", options=options("1B"))
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(batch()), plain(batch()))
    assert graphs() == []


@pytest.mark.parametrize("suppress", [False, True])
def test_a_budget_that_no_plan_meets_is_an_error_at_every_call(suppress: bool) -> None:
    model = net()
    model.compile(backend="remat", options=options("1kB"))
    with torch._dynamo.config.patch(suppress_errors=suppress):
        for _ in range(2):
            with pytest.raises(InfeasibleBudgetError, match="least feasible peak"):
                model(batch())


def test_accumulated_gradients_are_planned_for_when_they_are_there() -> None:
    model = net()
    expected = record(model, lambda: (model(batch()) for _ in range(2)), steps=1)
    model = net()
    model.compile(backend="remat", options=options("250kB", optimizer="auto"))
    assert equal(record(model, lambda: (model(batch()) for _ in range(2)), steps=1), expected)
    graph = only()
    assert graph.plans == 2
    assert graph.plan is not None
    assert graph.plan.protocol.gradients_resident
    assert graph.plan.recomputed
    assert graph.plan.optimizer == "AdamW, found holding the parameters"


def test_another_optimizer_than_the_assumed_one_is_planned_for() -> None:
    model = net()
    model.compile(backend="remat", options=options("250kB", optimizer="auto"))
    model(batch()).backward()
    assert only().plan.optimizer == "AdamW, assumed"  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    model(batch()).backward()
    assert only().plan.optimizer == "SGD, given"  # type: ignore[union-attr]


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_and_inside_the_compiled_code(inside: bool) -> None:
    x = batch()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value: Tensor = model(x)
            return value

    model = net()
    expected = record(model, lambda: [loss(model)])
    model = net()
    if inside:
        step = torch.compile(loss, backend="remat", options=options("130kB"), fullgraph=True)
    else:
        model.compile(backend="remat", options=options("130kB"), fullgraph=True)
        step = loss
    assert equal(record(model, lambda: [step(model)]), expected)
    assert only().plan.recomputed  # type: ignore[union-attr]


def test_ops_are_named_by_the_users_modules_and_lines() -> None:
    model = net()
    more = {"recompute": ("second::aten.addmm*",)}
    model.compile(backend="remat", options=options("300kB", **more), fullgraph=True)
    model(batch()).backward()
    plan = only().plan
    assert plan is not None
    again = {(tensor.module, tensor.source.split(":")[0]) for tensor in plan.recomputed}
    assert ("second", "test_backend.py") in again


def test_an_unknown_option_and_a_missing_budget_are_errors() -> None:
    for given, message in (({"budget_gb": 1, "bugdet": 2}, "bugdet"), (None, "needs a budget")):
        model = net()
        model.compile(backend="remat", options=given)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            model(batch())


def test_another_compiler_around_an_optimised_model_says_that_the_plan_is_lost() -> None:
    model = optimize_checkpoints(net(), "1MB", time_limit_s=1.0)
    other = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"backend='aot_eager'.*its plan is not used"):
        other(batch()).backward()
    other(batch()).backward()  # said once
    model.eval()
    other(batch())


def test_our_compiler_around_an_optimised_model_plans_by_its_options() -> None:
    plain = net()
    expected = record(plain, lambda: [plain(batch())])
    model = optimize_checkpoints(net(), "250kB", optimizer="AdamW", time_limit_s=1.0)
    step = torch.compile(lambda x: model(x) * 1, backend="remat", fullgraph=True)
    assert equal(record(model, lambda: [step(batch())]), expected)
    plan = only().plan
    assert plan is not None
    assert plan.budget_bytes == 250_000
    assert plan.recomputed


def test_the_snippet_of_the_docs_runs_and_plans() -> None:
    page = Path(__file__).parent.parent / "docs" / "torch_compile.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(snippet, str(page), "exec"), {"__name__": "snippet"})
    graph = only()
    assert graph.calls == 3
    assert graph.plan is not None
    assert graph.plan.recomputed
