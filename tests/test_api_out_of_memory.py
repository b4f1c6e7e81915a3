"""Out of memory in a planned step: one message with the plan, the allocator's state and the likely cause."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import LOOSE, Step, make, optimized, record, same

from remat import optimize_checkpoints
from remat.out_of_memory import Circumstances, cuda_state, explanation, host_state, requested
from remat.stats import Stats

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
STEP = Step((X,))
GB = 10**9
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())


def huge(like: Tensor) -> Tensor:
    return torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_real_failure_is_explained_released_and_the_next_step_trains(phase: str) -> None:
    model = optimized(make(net), STEP, 10**12, recompute=("1",))
    parts = model.remat.planned.parts
    graph = parts.forward if phase == "forward" else parts.stages[-1].module
    first = next(n for n in graph.graph.nodes if n.op == "call_function")
    with graph.graph.inserting_after(first):
        large = graph.graph.call_function(huge, (first,))
    graph.recompile()
    with pytest.raises(RuntimeError, match="remat: out of memory") as found:
        STEP.loss(model(X)).backward()  # type: ignore[no-untyped-call]
    text = str(found.value)
    assert type(found.value) is RuntimeError
    assert text.startswith(f"remat: out of memory in the planned {phase}.")
    assert f"plan: peak {model.remat.plan.peak_bytes / 1e3:.2f} kB" in text
    assert "asked for 1125.90 TB more" in text
    assert "DefaultCPUAllocator" in text
    assert text.count("likely cause") >= 1
    assert "DefaultCPUAllocator" in str(found.value.__cause__)
    del found
    assert model.remat.outstanding == 0
    graph.graph.erase_node(large)
    graph.recompile()
    model.zero_grad()
    assert same(record(model, STEP), record(make(net), STEP))


def test_what_the_failed_forward_held_is_released_when_it_raises() -> None:
    model = optimized(make(net), STEP, 10**12, recompute=("1",))
    graph = model.remat.planned.parts.forward
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    seen: list[Any] = []

    def watch(tensor: Tensor) -> Tensor:
        seen.append(tensor.untyped_storage()._weak_ref())
        return torch.empty(2**50, dtype=torch.uint8)

    with graph.graph.inserting_after(calls[2]):
        graph.graph.call_function(watch, (calls[2],))
    graph.recompile()
    error: RuntimeError | None = None
    try:
        model(X)
    except RuntimeError as raised:
        error = raised
    assert error is not None  # it is alive, and with it the frames that it has left
    (reference,) = seen
    assert torch.UntypedStorage._expired(reference)


LIMITED = """
import resource, sys, torch
from torch import nn
from remat import optimize_checkpoints
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())
model = optimize_checkpoints(model, 1, (torch.randn(2**18, 8),), gap=1.0, recompute=("1",))
print(model.remat.plan.is_eager, model.remat.plan.peak_bytes)
x = torch.randn(2**18, 8)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))
try:
    model(x).sum().backward()
except RuntimeError as error:
    print(str(error))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
model(x).sum().backward()
print(model.remat.stats.planned)
"""


def test_a_process_with_a_limit_on_its_memory() -> None:
    env = {"KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, env=env
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("False ")
    assert any(line.startswith("remat: out of memory in the planned") for line in lines)
    assert lines[-1] == "1"  # the one that ran out is not counted


def test_a_call_without_a_plan_says_so() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.lin(x).new_empty(2**50) if len(x) > 16 else self.lin(x).tanh()

    model: Any = optimize_checkpoints(make(Grows), 1, (X,), **LOOSE)
    with (
        pytest.warns(UserWarning, match="without the memory cap"),
        pytest.raises(RuntimeError, match="a training call without a plan") as found,
    ):
        model(torch.cat([X, X]))
    assert "no budget caps: tensor argument 0 is float32[32, 8]" in str(found.value)


def test_other_errors_pass_as_they_are() -> None:
    model = optimized(make(net), STEP, 10**12, recompute=("1",))
    loss = STEP.loss(model(X))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def circumstances() -> Circumstances:
    plan = optimized(make(net), STEP, 10**12, recompute=("1",)).remat.plan
    plan = replace(
        plan,
        device="cuda",
        peak_bytes=18 * GB,
        budget_bytes=20 * GB,
        resident_bytes=4 * GB,
        baseline_peak_bytes=30 * GB,
    )
    return Circumstances("backward", plan, 0, "", "")


def stats_of(allocated: int, reserved: int) -> dict[str, int]:
    return {"allocated_bytes.all.current": allocated, "reserved_bytes.all.current": reserved}


@pytest.mark.parametrize(
    ("allocated", "reserved", "free", "cause"),
    [
        (15, 23, 0.5, "fragmentation: 8.00 GB are reserved and unused"),
        (23, 23.5, 0.2, "this process holds 7.15 GB more than the plan"),
        (14, 14.5, 0.5, "other processes hold 9.00 GB of the device"),
    ],
)
def test_the_allocator_tells_the_likely_cause(
    allocated: float, reserved: float, free: float, cause: str, circumstances: Circumstances
) -> None:
    figures = stats_of(int(allocated * GB), int(reserved * GB))
    state = cuda_state(figures, int(free * GB), 24 * GB, CUDA)
    text = explanation(circumstances, Stats(), state, CUDA)
    causes = [line for line in text.splitlines() if "likely cause" in line]
    assert len(causes) == 1
    assert cause in causes[0]
    assert "plan: peak 18.00 GB under a budget of 20.00 GB" in text
    assert f"cuda: {allocated:.2f} GB in tensors, {reserved:.2f} GB reserved by torch" in text
    assert "asked for 2.15 GB more" in text


def test_what_the_dropin_knows_is_named(circumstances: Circumstances) -> None:
    stats = Stats()
    stats.fallbacks["other shapes"] = 3
    found = replace(circumstances, outstanding=2, other_optimizer="Adafactor")
    state = cuda_state(stats_of(15 * GB, 15 * GB), 9 * GB, 24 * GB, CUDA)
    text = explanation(found, stats, state, CUDA)
    assert "3 forwards are outstanding, planned for 1" in text
    assert "Adafactor steps, and AdamW" in text
    assert "3 earlier calls ran the original forward" in text


def test_on_the_host_what_is_known_is_said(circumstances: Circumstances) -> None:
    state = host_state({"MemAvailable": 2 * GB, "MemTotal": 16 * GB}, "")
    text = explanation(circumstances, Stats(), state, "")
    assert "2.00 GB free, 16.00 GB in all" in text
    assert "the budget is above the 16.00 GB of the device" in text
    assert "nothing is known" in explanation(circumstances, Stats(), host_state({}, ""), "")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA, 2 * 2**30),
        ("Tried to allocate 512.00 MiB (GPU 0)", 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes.", 1024),
        ("something else", None),
    ],
)
def test_the_size_that_was_asked_for_is_read(text: str, size: int | None) -> None:
    assert requested(text) == size


def test_the_errors_of_both_allocators_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**50, dtype=torch.uint8)
    assert requested(str(found.value)) == 2**50
