"""More than one process: one plan for all ranks, and what DDP itself holds.

One plan. Ranks that ask the same question get one answer: the first to ask solves and puts the plan into
the store of the default process group, the others wait for it there. There is no collective, so nothing
hangs if a rank plans alone (its batch has other sizes, it runs its original forward): it solves, too, and
ranks that wait in vain for one that died solve in the end. A rank runs the plan of another only if that is a
plan of its own graph and fits its own budget at its own sizes (`replay`). Nothing that ranks send each other
is inside the graph, so ranks with different plans train just as well.

Buckets. DDP copies gradients into buckets that take as much as all trainable parameters, and keeps them. With
`gradient_as_bucket_view` the gradients are these buckets, there before the first forward.

Not handled: what a communication hook holds, `delay_all_reduce_named_params`, DDP's mixed precision; what
`fully_shard` itself holds (shards, gathered parameters of other blocks, what it prefetches).
"""

import gc
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat.passes import Plan, Prepared

from .planned import Planned
from .planner import make_plan
from .request import Request

GRACE = 20.0
"""Seconds for which the other ranks let rank 0 ask first, when a drop-in makes its first plan."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the DDP wrapper of a model holds."""

    bytes: int = 0
    """Beside the gradients."""
    resident_gradients: bool = False
    """Gradients are views of the buckets, so their memory is there throughout."""


def buckets_of(model: nn.Module) -> Buckets:
    """The buckets of the DDP wrapper around `model` (or around a module that holds it), if there is one."""
    if not dist.is_available() or not dist.is_initialized():
        return Buckets()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel) and any(
            module is model for module in candidate.modules()
        ):
            if candidate.gradient_as_bucket_view:
                return Buckets(resident_gradients=True)
            skipped = candidate.parameters_to_ignore
            reduced = [
                p
                for name, p in candidate.module.named_parameters()
                if p.requires_grad and name not in skipped
            ]
            return Buckets(sum(p.nbytes for p in reduced))
    return Buckets()


def plan_together(
    request: Request,
    report: Callable[[str], None],
    prepared: Prepared | None,
    name: str,
    first: bool,
) -> Planned:
    """Plan a step; together with the other ranks, if there are some.

    Args:
        request: what is asked for.
        report: see `make_plan`, likewise `prepared`.
        prepared: the captured step, if it is known.
        name: of the question, the same on all ranks.
        first: all ranks ask it at about the same time.
    """
    store = _store()
    if store is None:
        return make_plan(request, report, prepared)
    asked: list[str] = []

    def recall(prepared: Prepared) -> Plan | None:
        key = f"remat/{name}/{_fingerprint(request, prepared)}"
        if first and dist.get_rank() > 0:
            _until(lambda: store.check([f"{key}/asked"]), GRACE)
        if store.add(f"{key}/asked", 1) == 1:
            asked.append(key)
            return None
        if not _until(lambda: store.check([key]), 60 + 10 * request.limits.time_s):
            return None
        answer = store.get(key).decode()
        return Plan.from_json(answer) if answer else None

    answer = ""
    try:
        planned = make_plan(request, report, prepared, recall)
        answer = planned.plan.to_json()
        return planned
    finally:  # also after an error: then the others find out for themselves
        for key in asked:
            store.set(key, answer)


def _store() -> Any:
    """Where ranks leave plans for each other; None if there is one rank only."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def _fingerprint(request: Request, prepared: Prepared) -> str:
    """Of what ranks must have in common: the graph, the budget, the demands; not sizes or other bytes."""
    parts = (
        [(op.name, op.target, op.operands) for op in prepared.graph.ops],
        request.budget,
        asdict(replace(request.protocol, other_bytes=0)),
        request.patterns,
        request.optimizer.how,
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, for so long at most; whether it has come.

    A blocking wait would hold the lock of the store, which the backends use as well.
    """
    deadline = time.monotonic() + seconds
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
