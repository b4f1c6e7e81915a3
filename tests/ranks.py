"""What each of two processes does in `test_distributed.py`; started by torchrun, writes JSON.

Run as ``torchrun --nproc-per-node 2 tests/ranks.py SCENARIO ...``. Every scenario is a function that returns
what it found on its rank; rank 0 writes ``{scenario: [of rank 0, of rank 1]}`` to the file named by RESULTS.
"""

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import remat.distributed
import remat.planner
import remat.runtime
from remat import RematError, SolverError, StepProtocol, measure_peak, optimize_checkpoints

WIDTH = 32
DROPPED = StepProtocol(outputs_held=False)


class Block(nn.Module):
    """A residual block with dropout; its activations are what can be recomputed."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape as before."""
        y: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    """Blocks, and a loss inside."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Mean square."""
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() * scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rows: int = 64) -> Tensor:
    """Another one on each rank."""
    torch.manual_seed(10 + dist.get_rank())
    return torch.randn(rows, WIDTH)


BUDGET = 184_000
"""Bytes: between what a step on 64 rows under DDP takes at least, 147 kB, and in eager, 225 kB."""


def optimised(model: nn.Module, budget: int = BUDGET, **options: Any) -> Any:
    return optimize_checkpoints(
        model, f"{budget}B", optimizer="SGD", protocol=DROPPED, time_limit_s=2, **options
    )


def record(
    model: nn.Module,
    batches: list[Tensor],
    accumulate: int = 1,
    clear: bool = True,
    also: Callable[[int], tuple[Any, ...]] = lambda step: (),
) -> list[Tensor]:
    """Train; copies of all losses, gradients and, at the end, parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    torch.manual_seed(100 + dist.get_rank())
    for step, x in enumerate(batches):
        last = (step + 1) % accumulate == 0
        no_sync: Any = getattr(model, "no_sync", nullcontext)
        with nullcontext() if last else no_sync():
            loss = model(x, *also(step))
            loss.backward()
        seen.append(loss.detach().clone())
        if last:
            seen += [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear)
    return [*seen, *(full(p.detach()).clone() for p in model.parameters())]


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[float]]:
    """Times at which a function was called."""
    real, calls = getattr(module, name), list[float]()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(time.perf_counter())
        return real(*args, **kwargs)

    setattr(module, name, wrapper)
    try:
        yield calls
    finally:
        setattr(module, name, real)


def summary(planned: Any) -> dict[str, Any]:
    remat_ = planned.remat
    return {
        "steps": remat_.plan.steps,
        "repeats": len(remat_.plan.repetitions),
        "planned": remat_.stats.planned,
        "plans": remat_.stats.plans,
        "fallbacks": dict(remat_.stats.fallbacks),
        "gap": remat_.plan.gap,
        "status": str(remat_.plan.status),
    }


def ddp(
    rows: tuple[int, int] = (64, 64), accumulate: int = 1, steps: int = 4, **options: Any
) -> dict[str, Any]:
    """Plain DDP and DDP around a drop-in, on the same batches."""
    x = batch(rows[dist.get_rank()])
    plain = record(DistributedDataParallel(net(), **options), [x] * steps, accumulate)
    model = optimised(net())
    with counted(remat.planner, "arranged") as searches:
        planned = record(DistributedDataParallel(model, **options), [x] * steps, accumulate)
    return {"equal": equal(plain, planned), "searches": len(searches), **summary(model)}


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def ddp_plain() -> dict[str, Any]:
    return ddp()


def ddp_unused() -> dict[str, Any]:
    return ddp(find_unused_parameters=True)


def ddp_static() -> dict[str, Any]:
    return ddp(static_graph=True)


def ddp_views() -> dict[str, Any]:
    return ddp(gradient_as_bucket_view=True)


def ddp_no_sync() -> dict[str, Any]:
    return ddp(accumulate=2)


def ddp_other_shapes() -> dict[str, Any]:
    return ddp(rows=(64, 48))


def ddp_one_falls_back() -> dict[str, Any]:
    """Rank 1 passes another number once; it may be another one at every call, so it is not planned for."""
    x = batch()

    def scale(step: int) -> tuple[float]:
        return (0.5 if dist.get_rank() and step == 2 else 1.0,)

    plain = record(DistributedDataParallel(net()), [x] * 4, also=scale)
    model = optimised(net())
    planned = record(DistributedDataParallel(model), [x] * 4, also=scale)
    return {"equal": equal(plain, planned), **summary(model)}


def ddp_short_batch() -> dict[str, Any]:
    """Rank 1 has a short last batch."""
    x = batch()
    batches = [x, x, x[:40] if dist.get_rank() else x, x]
    plain = record(DistributedDataParallel(net()), batches)
    model = optimised(net())
    planned = record(DistributedDataParallel(model), batches)
    return {"equal": equal(plain, planned), **summary(model)}


def ddp_one_replans() -> dict[str, Any]:
    """Rank 1 has a larger batch, for which it alone needs another plan."""
    x = batch()
    torch.manual_seed(20)
    batches = [x, torch.randn(96, WIDTH) if dist.get_rank() else x, x]
    plain = record(DistributedDataParallel(net()), batches)
    model = optimised(net(), dynamic={"x": {0: "batch"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = record(DistributedDataParallel(model), batches)
    return {"equal": equal(plain, planned), **summary(model)}


def solver_fails_on_one() -> dict[str, Any]:
    """The rank that solves gets an error; the other does not wait for it."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise SolverError("broken")

    planner: Any = remat.planner
    real = planner.arranged
    if dist.get_rank() == 0:
        planner.arranged = broken
    try:
        model = optimised(net(), example_args=(torch.randn(64, WIDTH),))
        return {"error": "", "steps": model.remat.plan.steps}
    except SolverError as error:
        return {"error": str(error)}
    finally:
        planner.arranged = real


def ddp_overlap() -> dict[str, Any]:
    """When the first bucket is reduced, and when the stages of backward begin."""
    wrapped = DistributedDataParallel(optimised(net()), bucket_cap_mb=0.005)
    reduced: list[float] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        reduced.append(time.perf_counter())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, hook)
    x = batch()
    for _ in range(2):  # DDP arranges its buckets anew after the first
        wrapped(x).backward()
        wrapped.zero_grad()
    reduced.clear()
    loss = wrapped(x)
    with counted(remat.runtime, "_run_stage") as stages:
        loss.backward()
    before = sum(at < stages[-1] for at in reduced)
    return {"buckets": len(reduced), "stages": len(stages), "before the last stage": before}


def ddp_memory(**options: Any) -> dict[str, Any]:
    """Predicted and measured peak of a step beyond what is there before it."""
    x = batch(256)
    model = optimised(net(), 450_000)
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def step() -> None:
        wrapped(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    measured = measure_peak(step, warmup=2)
    plan = model.remat.plan
    return {
        "measured": measured + plan.resident_bytes,
        "peak": plan.peak_bytes,
        "budget": plan.budget_bytes,
        "resident": plan.resident_bytes,
        "parameters": parameter_bytes(net()),
        "x": x.nbytes,
        "repeats": len(plan.repetitions),
    }


def ddp_memory_views() -> dict[str, Any]:
    return ddp_memory(gradient_as_bucket_view=True)


def refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except RematError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refused_ddp() -> str:
    return refusal(lambda: optimised(DistributedDataParallel(net())))


def refused_inside() -> str:
    return refusal(lambda: optimised(nn.Sequential(DistributedDataParallel(net()))))


def fsdp_blocks() -> dict[str, Any]:
    """Each block optimised, then sharded; and the same without plans."""
    from torch.distributed.fsdp import fully_shard

    x = batch()
    results, drop_ins = [], []
    for plan in (False, True):
        model = net()
        for i, each in enumerate(model.blocks):
            if plan:
                model.blocks[i] = optimize_checkpoints(each, "94kB", time_limit_s=2)
                drop_ins.append(model.blocks[i])
            fully_shard(model.blocks[i])
        fully_shard(model)
        results.append(record(model, [x] * 3))
    return {"equal": equal(*results), "blocks": [summary(each) for each in drop_ins]}


def fsdp_root() -> dict[str, Any]:
    """The whole model is one unit."""
    from torch.distributed.fsdp import fully_shard

    x = batch()
    plain = net()
    fully_shard(plain)
    model = optimised(net(), 150_000)
    fully_shard(model)
    return {"equal": equal(record(plain, [x] * 3), record(model, [x] * 3)), **summary(model)}


def fsdp_refused() -> dict[str, str]:
    """Orders that do not work."""
    from torch.distributed.fsdp import fully_shard

    def after() -> object:
        model = net()
        fully_shard(model)
        return optimised(model)

    def blocks_under_a_plan(lazy: bool) -> Callable[[], object]:
        def make() -> object:
            x = batch()
            model = optimised(net(), example_args=() if lazy else (x,))
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            return model(x)

        return make

    def distributed_parameters() -> object:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_module

        x = batch()
        model = optimised(net(), example_args=(x,))
        distribute_module(model.blocks[0].up, init_device_mesh("cpu", (2,)))
        return model(x)

    return {
        "after": refusal(after),
        "blocks, lazy": refusal(blocks_under_a_plan(True)),
        "blocks": refusal(blocks_under_a_plan(False)),
        "parameters": refusal(distributed_parameters),
    }


def docs() -> int:
    """Run the snippets of the page, in order; the names that a reader has of their own are made up."""
    page = Path(__file__).parent.parent / "docs" / "distributed.md"
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {"torch": torch, "Model": Net, "loader": [batch(), batch()], "teacher": Net()}
    names |= {"Generator": Net, "Discriminator": Net, "Student": Net}
    for snippet in snippets:
        exec(snippet, names)
    assert names["model"].blocks[1].remat.plan.repetitions  # type: ignore[attr-defined]
    return len(snippets)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, globals()[name]())
        found[name] = every
    if dist.get_rank() == 0:
        with open(os.environ["RESULTS"], "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
