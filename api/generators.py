"""States of torch's random generators."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


def _devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    # Quicker than to look at each.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return list(dict.fromkeys(t.device for t in tensors if t.is_cuda))


def generators(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """States of the generators that a step may draw from: the CPU's and those of its GPUs."""
    found = [torch.cuda.get_rng_state(device) for device in _devices(tensors)]
    return (torch.get_rng_state(), *found)


def set_generators(states: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Put the generators that a step may draw from into these states."""
    torch.set_rng_state(states[0])
    for device, state in zip(_devices(tensors), states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def generators_at(
    states: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Generators in these states, and as they were afterwards."""
    now = generators(tensors)
    set_generators(states, tensors)
    try:
        yield
    finally:
        set_generators(now, tensors)
