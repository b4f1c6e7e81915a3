"""What of a script is on the device during a step that is not the planned module's own.

On a GPU the allocator knows what is there. On CPU it does not; known are the parameters that other modules
have in optimizers, with gradients and state, and forwards of other plans whose backward is still to come.

Not known on CPU: data, modules without an optimizer, and forwards that did not run as a plan.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir import Role
from remat.ir.structure import take_tensors
from remat.passes import optimizer_trace

from .dropin import Remat
from .finder import Arguments


def outstanding_bytes(remats: Iterable[Remat | None]) -> int:
    """Bytes that forwards of other planned modules hold now, on CPU."""
    return sum(
        remat.left_bytes()
        for remat in remats
        if remat is not None and remat.planned is not None and remat.planned.plan.device == "cpu"
    )


def beside(module: nn.Module, arguments: Arguments, optimizers: Iterable[Optimizer]) -> int:
    """Bytes on the device during a step that are not the module's own.

    Args:
        module: about to be called in training.
        arguments: of the call.
        optimizers: all of the script's.
    """
    own = [*module.parameters(), *module.buffers()]
    mine = {id(p) for p in own}
    others: dict[int, torch.Tensor] = {}
    coming = 0
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        outside = [p for p in held if id(p) not in mine]
        others |= {id(p): p for p in outside}
        coming += sum(p.nbytes for p in outside if p.requires_grad and p.grad is None)
        if outside and not any(p in optimizer.state for p in outside):
            trace = optimizer_trace(outside, optimizer)
            state = [b for b in trace.blocks if b.role is Role.OPTIMIZER_STATE]
            coming += sum(int(block.size) for block in state)
    device = own[0].device
    if device.type == "cuda":
        known = [*own, *_gradients(own), *take_tensors(arguments)[0]]
        known += [t for o in optimizers for t in state_tensors(o, mine)]
        return coming + max(0, torch.cuda.memory_allocated(device) - unique_bytes(known, device))
    present = [*others.values(), *_gradients(others.values())]
    present += [t for o in optimizers for t in state_tensors(o, set(others))]
    return coming + unique_bytes(present, device)


def _gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def state_tensors(optimizer: Optimizer, parameters: set[int]) -> list[torch.Tensor]:
    """Tensors of an optimizer's state for some parameters."""
    return [
        tensor
        for parameter, state in optimizer.state.items()
        if id(parameter) in parameters
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]


def unique_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages of tensors on a device, each counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (t.untyped_storage() for t in tensors if t.device == device)
    }
    return sum(storages.values())
