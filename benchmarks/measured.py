"""Measured on this machine's CPU: eager, block checkpointing, torch's budget, and our plans at equal peaks.

    python -m benchmarks.measured [--steps 15] [--budgets 0.5,0.1]

GPT-2 with 12 layers, small in width, dropout on; a step is forward and backward. All runs advance in turn,
one step each, so that a slow moment of the machine slows all of them; a step's time is divided by eager's of
the same turn, and the median taken. The peak is the allocator's, above what is there before the step.

torch's budget runs through ``torch.compile(backend="aot_eager")``, that is, with torch's partitioner and the
same kernels as eager. With dropout and a budget below 1, torch 2.13 draws new masks in backward and its
gradients are wrong; only its time and memory are compared. Prints Markdown.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config

from remat import InfeasibleBudgetError, StepProtocol, measure_peak, optimize_checkpoints

Batch = Mapping[str, Any]


@dataclass
class Run:
    """One way to train, and what was observed of it."""

    name: str
    step: Callable[[], None]
    peak: int = 0
    """Bytes above what was there before the step."""
    seconds: list[float] = field(default_factory=list)
    planned: float = 0.0
    """Overhead that the plan predicts, fraction of a step."""


def make_model() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    model: nn.Module = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=2048,
            n_embd=128,
            n_head=4,
            n_layer=12,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    return model.train()


def make_batch() -> dict[str, Any]:
    """Four sequences of 256 tokens."""
    ids = torch.randint(2, 2048, (4, 256), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def step_of(model: Callable[..., object], parameters: list[nn.Parameter], batch: Batch) -> Run:
    """A run that trains `model` without an optimizer."""

    def step() -> None:
        loss: Tensor = model(**batch).loss  # type: ignore[attr-defined]
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.grad = None

    return Run("", step)


def eager(batch: Batch) -> Run:
    """The model as it is."""
    model = make_model()
    return _named("eager", step_of(model, list(model.parameters()), batch))


def checkpointed(batch: Batch) -> Run:
    """`torch.utils.checkpoint` on every block."""
    model = make_model()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    name = "torch.utils.checkpoint, every block"
    return _named(name, step_of(model, list(model.parameters()), batch))


def torch_budget(batch: Batch, budget: float) -> Run:
    """The partitioner of torch under a budget, which is read when the first step compiles."""
    model = make_model()
    compile_graph = lookup_backend("aot_eager")
    # A function of its own: dynamo would take another run's graph for the same backend.
    compiled = torch.compile(model, backend=lambda *args, **kwargs: compile_graph(*args, **kwargs))
    run = step_of(compiled, list(model.parameters()), batch)
    with config.patch(activation_memory_budget=budget):
        run.step()
    return _named(f"activation_memory_budget = {budget:g}", run)


def ours(batch: Batch, peak: int) -> Run:
    """Our plan for a peak above what is there before the step; the least one if none fits."""
    model = make_model()
    inputs = [value for value in batch.values() if isinstance(value, Tensor)]
    there = {id(x): x.nbytes for x in [*model.parameters(), *model.buffers(), *inputs]}
    budget = peak + sum(there.values())
    options = {
        "optimizer": None,
        "protocol": StepProtocol(outputs_held=False),
        "cost_model": "timed",
        "time_limit_s": 20.0,
        "gap": 0.001,
    }
    name = "remat at that peak"
    try:
        planned = optimize_checkpoints(model, f"{budget}B", (), batch, **options)  # type: ignore[arg-type]
    except InfeasibleBudgetError as error:
        planned = optimize_checkpoints(model, f"{error.least_peak_bytes}B", (), batch, **options)  # type: ignore[arg-type]
        name = "remat at its least peak"
    run = _named(name, step_of(planned, list(model.parameters()), batch))
    run.planned = vars(planned)["remat"].plan.overhead
    return run


def _named(name: str, run: Run) -> Run:
    run.name = name
    return run


def measure(runs: list[Run], steps: int) -> None:
    """Step times, all runs in turn."""
    for _ in range(steps):
        for run in runs:
            start = time.perf_counter()
            run.step()
            run.seconds.append(time.perf_counter() - start)


def table(runs: list[Run]) -> str:
    """Markdown; the first run is eager."""
    base = runs[0]
    lines = ["| run | peak | step time over eager's | predicted |", "| --- | ---: | ---: | ---: |"]
    for run in runs:
        ratio = statistics.median(a / b for a, b in zip(run.seconds, base.seconds, strict=True))
        planned = f"{1 + run.planned:.3f}" if run.name.startswith("remat") else ""
        lines.append(f"| {run.name} | {run.peak / 1e6:.1f} MB | {ratio:.3f} | {planned} |")
    lines += ["", f"Eager step: {statistics.median(base.seconds):.2f} s (median)."]
    return "\n".join(lines)


def main() -> int:
    """Build all runs, measure, print; return the exit status."""
    parser = argparse.ArgumentParser(description="step time and peak, measured on this CPU")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--budgets", default="0.5,0.1", help="of torch, comma-separated")
    arguments = parser.parse_args()
    batch = make_batch()
    dynamo_config.recompile_limit = 64
    runs = [eager(batch)]
    runs[0].peak = measure_peak(runs[0].step)
    peers = [partial(checkpointed, batch)]
    peers += [partial(torch_budget, batch, float(x)) for x in arguments.budgets.split(",")]
    for make_peer in peers:
        peer = make_peer()
        peer.peak = measure_peak(peer.step)
        mine = ours(batch, peer.peak)
        mine.peak = measure_peak(mine.step)
        runs += [peer, mine]
        print(f"{peer.name}: ready", file=sys.stderr, flush=True)
    measure(runs, 1)
    for run in runs:
        run.seconds.clear()
    measure(runs, arguments.steps)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
