"""Reading a budget: numbers and strings to bytes."""

import math
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
RESERVE = 0.05
"""Part of the device's memory that "auto" leaves to the runtime, libraries and fragmentation."""


def budget_bytes(budget: float | str, memory: int) -> int:
    """Bytes of a budget.

    Args:
        budget: a number of GB (10**9 bytes); a string with a unit, "8GB", "24GiB", "900MB", "123456B"; a
            part of the device's memory, "80%"; or "auto", the device's memory less `RESERVE`.
        memory: bytes of the device that "80%" and "auto" refer to.

    Raises:
        ValueError: not a budget, not finite, not above zero, or over 100 %.
        TypeError: neither a number nor a string.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(f"budget must be a number of GB or a string such as '8GB', not {budget!r}")
    count = _from_text(budget, memory) if isinstance(budget, str) else budget * 10**9
    if not math.isfinite(count):
        raise ValueError(f"budget must be finite, got {budget!r}")
    if count < 1:
        raise ValueError(f"budget must be above zero, got {budget!r}")
    return int(count)


def _from_text(text: str, memory: int) -> float:
    if text.strip().lower() == "auto":
        return (1 - RESERVE) * memory
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+|%)?\s*", text, re.IGNORECASE)
    unit = (match.group(2) or "").lower() if match else ""
    try:
        value = float(match.group(1)) if match else math.nan
    except ValueError:
        value = math.nan
    if math.isnan(value) or unit not in {*_UNITS, "%"}:
        raise ValueError(
            f"cannot read the budget {text!r}. Give a number of GB, or a number with a unit: "
            "'8GB', '24GiB', '900MB', '123456B', '80%' of the device, or 'auto'."
        )
    if unit == "%" and value > 100:
        raise ValueError(f"budget must be at most 100% of the device, got {text!r}")
    return value / 100 * memory if unit == "%" else value * _UNITS[unit]


def device_memory(device: "torch.device") -> int:
    """Bytes of memory of a device; of the machine, for the CPU."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(device: "torch.device") -> int:
    """Bytes of it that this process can have: what is free and, on CUDA, what its allocator holds."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return device_memory(device)


def in_units(count: int) -> str:
    """Bytes for people, in decimal units."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
