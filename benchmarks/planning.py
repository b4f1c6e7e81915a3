"""How long planning takes, beside what torch.compile takes to its first step; and what a planned step costs.

Prints one JSON line for each part of the comparison. Both sides run in a process of their own, one after
the other, on the same model, batch and threads:

    python -m benchmarks.planning [--layers 12] [--width 256] [--batch 4] [--length 192]

`remat` is planned at the middle between eager's peak and the least peak, and once more at eager's peak,
where the original forward runs: there a step should take no longer than 1.05 times eager's.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from remat import StepProtocol, optimize_checkpoints

STEPS = 10
PROTOCOL = StepProtocol(outputs_held=False)


def make(size: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 of the size asked for, and a batch of random tokens."""
    config = GPT2Config(
        vocab_size=256,
        n_layer=size.layers,
        n_embd=size.width,
        n_head=max(1, size.width // 32),
        n_positions=size.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (size.batch, size.length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Forward, backward, gradients dropped."""
    model(**batch).loss.backward()
    model.zero_grad()


def seconds(run: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compile_first_step(size: argparse.Namespace) -> dict[str, Any]:
    """Time of the first step under torch.compile, less a later one."""
    model, batch = make(size)
    step(model, batch)
    compiled: Any = torch.compile(model, backend="aot_eager")
    first = seconds(lambda: step(compiled, batch))
    return {"what": "torch.compile aot_eager, first step", "seconds": round(first, 2)}


def budgets(size: argparse.Namespace) -> tuple[int, int]:
    """Least peak and eager's peak, bytes."""
    model, batch = make(size)
    probe: Any = optimize_checkpoints(model, 1e6, (), batch, protocol=PROTOCOL)
    return probe.remat.plan.least_peak_bytes, probe.remat.plan.baseline_peak_bytes


def plan(size: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Time to plan in a process that has planned nothing before, by part."""
    model, batch = make(size)
    step(model, batch)
    start = time.perf_counter()
    planned: Any = optimize_checkpoints(model, f"{budget}B", (), batch, protocol=PROTOCOL)
    total = time.perf_counter() - start
    found = planned.remat.plan
    return {
        "what": "remat, plan at the middle",
        "seconds": round(total, 2),
        "parts": {part: round(s, 2) for part, s in planned.remat.planned.seconds.items()},
        "overhead_percent": round(100 * found.overhead, 2),
        "gap_points": round(100 * found.gap, 3),
    }


def planned_step(size: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Step time at eager's peak and at the middle, as ratios to eager's, interleaved."""
    model, batch = make(size)
    at_peak: Any = optimize_checkpoints(model, 1e6, (), batch, protocol=PROTOCOL)
    planned: Any = optimize_checkpoints(model, f"{budget}B", (), batch, protocol=PROTOCOL)
    models = {"eager": model, "at eager's peak": at_peak, "at the middle": planned}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(STEPS):
        for name, each in models.items():
            times[name].append(seconds(lambda each=each: step(each, batch)))  # type: ignore[misc]
    base = median(times["eager"])
    ratios = {name: round(median(t) / base, 3) for name, t in times.items()}
    return {"what": "step time, ratio to eager", "eager_seconds": round(base, 3), "ratios": ratios}


def main() -> int:
    """Run every part in a fresh process."""
    parser = argparse.ArgumentParser(description="Planning time and step time, side by side")
    for name, default in (("layers", 12), ("width", 256), ("batch", 4), ("length", 192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    size = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        middle = sum(pool.apply(budgets, (size,))) // 2
        print(json.dumps(pool.apply(compile_first_step, (size,))), flush=True)
        for part in (plan, planned_step):
            print(json.dumps(pool.apply(part, (size, middle))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
