"""`torch.compile` and our backend, measured on this machine's CPU: peak, step time, loss.

    python -m benchmarks.compiled [--steps 10] [--layers 4] [--budget 0.5]

GPT-2, small in width, dropout on; a step is forward, backward and AdamW. The budget of ours is that part of
the way from the least peak to eager's. The peak is the allocator's, with what is there before the step. All
runs advance in turn, one step each; a step's time is divided by eager's of that turn, and the median taken.
The loss column is the largest relative difference to eager's losses of the first steps, from the same seed.

Inductor draws random numbers by eager's kernels here (``fallback_random``), so that losses can be compared.
Its ``activation_memory_budget`` below 1 draws other masks in backward than in forward (torch 2.13). Needs
g++. Prints Markdown.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config
from torch._inductor import config as inductor_config

from remat import Plan, measure_peak
from remat.backend import compiled

COMPARED = 3
"""Losses that are compared with eager's."""


@dataclass
class Run:
    """One way to train, and what was observed of it."""

    name: str
    step: Callable[[], Tensor]
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    plan: Plan | None = None
    seconds: list[float] = field(default_factory=list)


def make_run(name: str, layers: int, **how: Any) -> Run:
    """A fresh model, trained through `torch.compile(**how)`, or as it is."""
    torch.manual_seed(0)
    settings = {"vocab_size": 512, "n_embd": 128, "n_head": 4, "n_positions": 256}
    model: Any = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=1, **settings)
    ).train()
    model.loss_type = "ForCausalLM"  # else it logs, which breaks Dynamo's graph
    ids = torch.randint(2, 512, (4, 256), generator=torch.Generator().manual_seed(0))
    run: Any = torch.compile(model, fullgraph=True, **how) if how else model
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Tensor:
        output: Any = run(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss: Tensor = output.loss.detach()
        return loss

    return Run(name, step)


def observe(run: Run) -> Run:
    """Compile; note the first losses and the peak."""
    before = compiled()
    torch.manual_seed(1)
    run.losses = [float(run.step()) for _ in range(COMPARED)]
    mine = [graph for graph in compiled() if graph not in before]
    run.plan = mine[0].plan if mine else None
    run.peak = measure_peak(run.step)
    print(f"{run.name}: ready", file=sys.stderr, flush=True)
    return run


def runs_of(layers: int, part: float) -> list[Run]:
    """All runs; ours at a budget between the least peak and eager's."""
    huge = {"budget_gb": 1000, "optimizer": "AdamW", "time_limit_s": 10.0}
    probe = observe(make_run("", layers, backend="remat", options=huge)).plan
    assert probe is not None
    least, most = probe.least_peak_bytes, probe.baseline_peak_bytes
    options = {**huge, "budget_gb": f"{int(least + part * (most - least))}B"}
    fused = {**options, "inductor": True}
    runs = [
        observe(make_run("eager", layers)),
        observe(make_run("remat", layers, backend="remat", options=options)),
        observe(make_run("remat, inductor=True", layers, backend="remat", options=fused)),
        observe(make_run("torch.compile", layers, mode="default")),
    ]
    with config.patch(activation_memory_budget=0.5):
        name = "torch.compile, activation_memory_budget = 0.5"
        runs.append(observe(make_run(name, layers, dynamic=False)))
    for run in runs:
        run.peak += probe.resident_bytes
    return runs


def table(runs: list[Run]) -> str:
    """Markdown; the first run is eager."""
    base = runs[0]
    lines = [
        "| run | budget | plan's peak | measured peak | step time over eager's | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        ratio = statistics.median(a / b for a, b in zip(run.seconds, base.seconds, strict=True))
        off = max(abs(a - b) / b for a, b in zip(run.losses, base.losses, strict=True))
        plan = run.plan
        given = (
            f"{plan.budget_bytes / 1e6:.1f} MB | {plan.peak_bytes / 1e6:.1f} MB" if plan else " | "
        )
        loss = "equal" if off == 0 else f"{off:.0e}"
        lines.append(f"| {run.name} | {given} | {run.peak / 1e6:.1f} MB | {ratio:.2f} | {loss} |")
    return "\n".join(lines)


def main() -> int:
    """Build all runs, measure, print; return the exit status."""
    parser = argparse.ArgumentParser(description="torch.compile and our backend on this CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.5, help="0: least peak, 1: eager's")
    arguments = parser.parse_args()
    dynamo_config.recompile_limit = 64
    inductor_config.fallback_random = True
    runs = runs_of(arguments.layers, arguments.budget)
    for _ in range(arguments.steps):
        for run in runs:
            start = time.perf_counter()
            run.step()
            run.seconds.append(time.perf_counter() - start)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
