"""What a drop-in costs per call, on a GPT-2 of 12 layers x 256: the guard, and a step at eager's own budget.

Both are of many, in processor time; steps alternate with eager ones, so that other work of the machine falls
on both alike. The guard is everything that a call does before the original forward or the plan runs.

    python -m benchmarks.guard [--steps 30]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from remat import optimize_checkpoints
from remat.ir.structure import take_tensors

CALLS = 2000


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    eager, batch = gpt2()
    planned, _ = gpt2()
    example = {**batch, "use_cache": False}
    model: Any = optimize_checkpoints(
        planned, "1TB", (), example, optimizer=None, time_limit_s=2, gap=1
    )
    step(eager, batch)
    step(model, batch)
    assert model.remat.stats.planned == 1
    found = guard_us(model, batch)
    middle = statistics.median(found)
    print(f"guard: least {min(found):.0f} us per call, median {middle:.0f} us (of {CALLS})")
    ratio = statistics.median(
        timed(lambda: step(model, batch), time.process_time)
        / timed(lambda: step(eager, batch), time.process_time)
        for _ in range(steps)
    )
    print(f"step at a budget above eager's peak: {ratio:.3f} x eager (median of {steps} pairs)")


def gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, and a batch."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=12, n_embd=256, n_head=8, vocab_size=1024, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(1024, (2, 64))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return transformers.GPT2LMHeadModel(config).train(), batch


def step(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Forward and backward."""
    model(**batch, use_cache=False).loss.backward()
    model.zero_grad()


def guard_us(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """Times of the check that a call makes, microseconds."""
    remat, given = model.remat, {**batch, "use_cache": False}

    def check() -> None:
        call = remat._arguments.normalize((), given)
        assert call is not None
        tensors, pattern = take_tensors(call)
        family, state = remat.kept.serving(tensors, pattern)
        assert family.at(tensors, family.guard.has_gradients(state)) is not None

    return [1e6 * timed(check, time.thread_time) for _ in range(CALLS)]


def timed(function: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds that it takes."""
    start = clock()
    function()
    return clock() - start


if __name__ == "__main__":
    main()
