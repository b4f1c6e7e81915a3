"""Train one model eagerly and under several memory budgets, side by side, and compare.

All runs start from the same weights and random state and see the same batches. They advance in turn,
one step each, so that a slow moment of the machine slows all of them; step times are compared step by
step. Each run keeps its own random stream, so a planned step that drew more or less than eager's
would show in the losses from then on.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from remat import StepProtocol, measure_peak, optimize_checkpoints, plan_checkpoints
from remat.passes import Plan

Batch = dict[str, Tensor]

# The loops below keep nothing of the output but the loss, and that only through backward.
PROTOCOL = StepProtocol(outputs_held=False)

# Where the budgets lie between the least feasible peak (0) and eager's own peak (1).
BUDGETS = (0.6, 0.25, 0.0)


@dataclass
class Run:
    """One training run and what was observed of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    plan: Plan | None = None
    """None: eager."""
    planning_s: float = 0.0
    measured_peak: int = 0
    """Bytes above what was there before the step."""
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    random_state: Tensor = field(default_factory=torch.get_rng_state)

    def step(self) -> None:
        """Train on the next batch."""
        batch = next(self.batches)
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        self.losses.append(loss.item())
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s.append(time.perf_counter() - start)
        self.random_state = torch.get_rng_state()


def options(description: str, steps: int) -> argparse.Namespace:
    """Read ``--steps`` and ``--quick`` from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run")
    parser.add_argument("--quick", action="store_true", help="a small model and 4 steps")
    transformers.logging.set_verbosity_error()
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 4
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: two to measure memory, one to measure time")
    return arguments


def compare(make_model: Callable[[], nn.Module], batches: Sequence[Batch], steps: int) -> int:
    """Train eagerly and under `BUDGETS`, print the table, return the exit status.

    Args:
        make_model: builds a model that returns an output with a ``loss``; called once per run.
        batches: used in turn.
        steps: of each run; memory is measured in the second, time in the third and later.

    Returns:
        0 if every loss equals eager's and every measured peak is within its budget, else 1.
    """
    eager = _start(make_model, batches)
    unlimited = plan_checkpoints(
        eager.model, 1e6, (), batches[0], optimizer=eager.optimizer, protocol=PROTOCOL
    )
    low, high = unlimited.least_peak_bytes, unlimited.baseline_peak_bytes
    budgets = [low + round(share * (high - low)) for share in BUDGETS]
    runs = [eager, *(_start(make_model, batches, budget) for budget in budgets)]
    for run in runs:
        run.measured_peak = measure_peak(run.step, warmup=1)
        run.step_s.clear()  # the profiler was on
    for _ in range(steps - 2):
        for run in runs:
            run.step()
    return _report(runs, unlimited)


def _start(
    make_model: Callable[[], nn.Module], batches: Sequence[Batch], budget: int | None = None
) -> Run:
    """Make a run from the one initial state; plan it if there is a budget, bytes."""
    torch.manual_seed(0)
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is None:
        return Run(model, optimizer, cycle(batches))
    start = time.perf_counter()
    planned: Any = optimize_checkpoints(
        model, f"{budget}B", (), batches[0], optimizer=optimizer, protocol=PROTOCOL
    )
    planning_s = time.perf_counter() - start
    return Run(planned, optimizer, cycle(batches), planned.remat.plan, planning_s)


def _report(runs: Sequence[Run], unlimited: Plan) -> int:
    """Print the table and the verdict; return the exit status."""
    eager = runs[0]
    print(
        _row("budget", "predicted", "measured", "off by", "step", "predicted", "planned", "loss")
    )
    print(_row("MB", "peak MB", "peak MB", "bytes", "time", "step time", "in s", "differs"))
    kept = True
    for run in runs:
        plan = run.plan or unlimited
        predicted = plan.peak_bytes if run.plan else plan.baseline_peak_bytes
        measured = plan.resident_bytes + run.measured_peak
        pairs = zip(run.step_s, eager.step_s, strict=True)
        slowdown = statistics.median(own / eagers for own, eagers in pairs)
        differs = max(abs(a - b) for a, b in zip(run.losses, eager.losses, strict=True))
        print(
            _row(
                _mb(plan.budget_bytes) if run.plan else "eager",
                _mb(predicted),
                _mb(measured),
                str(measured - predicted),
                f"{slowdown:.2f} x",
                f"{1 + plan.overhead:.2f} x" if run.plan else "1.00 x",
                f"{run.planning_s:.1f}" if run.plan else "-",
                str(differs),
            )
        )
        # Not `differs > 0`: a loss that is not a number must fail too.
        kept &= differs == 0.0 and (run.plan is None or measured <= plan.budget_bytes)
    steps, seconds = len(eager.losses), statistics.median(eager.step_s)
    print(f"\nloss {eager.losses[0]:.3f} -> {eager.losses[-1]:.3f} in {steps} steps", end="; ")
    print(f"an eager step takes {seconds:.2f} s; {_mb(unlimited.resident_bytes)} MB are resident")
    print("All losses equal eager's, all budgets kept." if kept else "FAILED: see the table.")
    return 0 if kept else 1


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _row(*cells: str) -> str:
    return "  ".join(f"{cell:>9}" for cell in cells)
