"""Autocast as it is at one time, and as it was at another."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

_DEVICES = ("cpu", "cuda")


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """What autocast casts to on each kind of device; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )


@contextlib.contextmanager
def autocast(dtypes: Sequence[torch.dtype | None], *, cached: bool) -> Iterator[None]:
    """Autocast as it was.

    Args:
        dtypes: from `autocast_dtypes`.
        cached: casts are kept.
    """
    with contextlib.ExitStack() as stack:
        for device, dtype in zip(_DEVICES, dtypes, strict=True):
            if dtype is not None or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(
                        device, dtype=dtype, enabled=dtype is not None, cache_enabled=cached
                    )
                )
        yield
