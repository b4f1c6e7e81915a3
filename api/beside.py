"""What else in the process holds memory while a model trains: other models, and what their training keeps.

Definitions.
    (1) A module *holds* the storages of its parameters, buffers and gradients; with an optimizer, also a
        gradient for every parameter that the optimizer trains, and the optimizer's state as it is from the
        second step on.
    (2) Beside a model that is planned are all other drop-ins in the process: what they hold on the same
        device, with the live optimizer that trains them and DDP's buckets, less what is the model's own;
        and what their forwards have left whose backward has not run (see `outstanding`).

A model that was never optimised is not seen: a frozen teacher, say, whose bytes the user passes as
``StepProtocol(other_bytes=resident_bytes(teacher))``. A sharded model is planned alone: what is known of the
other models on its device is not what they hold while they run.

Not handled: what forwards of others have left that ran outside their plan.
"""

import gc
import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir import Role
from remat.passes.eager import optimizer_trace

from .distributed import buckets_of
from .optimizers import live_optimizer
from .wrappers import is_sharded

MODELS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules that are alive and are, or have been, drop-ins."""


def resident_bytes(module: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Bytes that a model keeps from step to step, each storage once, whatever device it is on.

    For models beside the one that is optimised: ``StepProtocol(other_bytes=resident_bytes(teacher))``.

    Args:
        module: its parameters, buffers and present gradients count.
        optimizer: that trains it; then gradients of what it trains and its state count, too.
    """
    return _held(module, optimizer, None, ())


def held_beside(model: nn.Module, others: Sequence[nn.Module], device: torch.device) -> int:
    """Bytes that other models hold on a device.

    Args:
        model: that is planned; what is its own does not count.
        others: each may share tensors with it and with each other.
        device: of the plan.
    """
    seen = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    total = 0
    for other in others:
        parameters = [p for p in other.parameters() if p.requires_grad]
        total += _held(other, live_optimizer(parameters), device, seen) + buckets_of(other).bytes
        seen |= {_storage(t) for t in (*other.parameters(), *other.buffers())}
    return total


class Others:
    """The drop-ins beside one, with what they hold as it was when it was last looked at."""

    def __init__(self, number: int) -> None:
        """Of the drop-in of that number."""
        self._number = number
        self._alive: list[int] = []
        self._held = 0

    def bytes(self, model: nn.Module, device: torch.device, *, again: bool = False) -> int:
        """Bytes that they have on the device now.

        Args:
            model: the drop-in.
            device: of its plan.
            again: look at what they hold again, though they are the same as before.
        """
        alive = self._others()
        if not alive or is_sharded(model):
            return 0
        if list(alive) != self._alive:
            del alive
            gc.collect()  # what only cycles keep alive holds nothing for long
            alive = self._others()
            self._alive, again = list(alive), True
        if again:
            self._held = held_beside(model, list(alive.values()), device)
        left: list[int] = [vars(other)["remat"].left_bytes() for other in alive.values()]
        return self._held + sum(left)

    def _others(self) -> dict[int, nn.Module]:
        drop_ins = {vars(m)["remat"].number: m for m in MODELS if "remat" in vars(m)}
        return {n: drop_ins[n] for n in sorted(drop_ins) if n != self._number}


def follow(tensor: torch.Tensor, done: Callable[[], None]) -> None:
    """Call `done` once, when a gradient reaches the tensor or when nothing holds it any more."""
    end = weakref.finalize(tensor, done)
    end.atexit = False
    tensor.register_hook(lambda gradient: end())  # type: ignore[no-untyped-call]


def _held(
    module: nn.Module,
    optimizer: Optimizer | None,
    device: torch.device | None,
    without: Collection[int],
) -> int:
    counted = {
        id(tensor): tensor
        for tensor in (*module.parameters(), *module.buffers())
        if device in (None, tensor.device) and _storage(tensor) not in without
    }
    by_optimizer = (
        {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else {}
    )
    trained = [t for key, t in counted.items() if t.requires_grad and key in by_optimizer]
    storages = {_storage(t): _local(t).untyped_storage().nbytes() for t in counted.values()}
    gradients = [t.grad for t in counted.values() if t.grad is not None]
    storages |= {_storage(t): _local(t).untyped_storage().nbytes() for t in gradients}
    due = sum(_local(t).nbytes for t in trained if t.grad is None)
    return sum(storages.values()) + due + _state(optimizer, trained)


def _state(optimizer: Optimizer | None, trained: Sequence[torch.Tensor]) -> int:
    """Bytes of optimizer state: what is there or, but for shards, will be after a step."""
    if optimizer is None or not trained:
        return 0
    kept = [optimizer.state.get(tensor) for tensor in trained]
    if all(kept) or any(_local(tensor) is not tensor for tensor in trained):
        tensors = [v for state in kept for v in (state or {}).values() if torch.is_tensor(v)]
        return sum({_storage(v): _local(v).untyped_storage().nbytes() for v in tensors}.values())
    blocks = optimizer_trace(list(trained), optimizer).blocks  # type: ignore[arg-type]
    return sum(int(block.size) for block in blocks if block.role is Role.OPTIMIZER_STATE)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _storage(tensor: torch.Tensor) -> int:
    return int(_local(tensor).untyped_storage()._cdata)
