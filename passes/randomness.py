"""Repeating a random op: the two functions that rewritten graphs call.

The state of the generator is kept before the first execution and put back around the second, so the
repetition draws what the first one drew and the user's random stream never notices.
"""

from collections.abc import Callable
from typing import Any

import torch

CPU_STATE_BYTES = 5056
"""Size of the CPU generator's state (a Mersenne twister)."""


def generator_state(device: str) -> torch.Tensor:
    """State of the default generator of `device`; a CPU tensor for CUDA devices too."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_generator_state(device: str, state: torch.Tensor) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def repeat_random(
    device: str, state: torch.Tensor, target: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `target` as it ran when the generator was in `state`; leave the generator as it is now."""
    now = generator_state(device)
    _set_generator_state(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set_generator_state(device, now)


def state_bytes(device: str) -> int:
    """Bytes of a kept state on the device itself."""
    return CPU_STATE_BYTES if torch.device(device).type == "cpu" else 0
