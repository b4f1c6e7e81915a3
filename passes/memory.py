"""Memory profile: bytes held at every instant of a trace, by role, and their peak.

Definition. Bytes at instant i = sizes of the blocks with ``birth <= i <= death``, plus the scratch of
i. The peak is the maximum over i; the instant where it is first reached is `peak_instant`.

Sizes are taken at one binding of the symbols. The symbolic peak (a `Max` of polynomials) is not made
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import sympy

from remat.ir import Block, Role, Trace


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes over a step, at one binding."""

    bytes: tuple[int, ...]
    """Bytes on the device at each instant, scratch included."""
    by_role: Mapping[Role, tuple[int, ...]]
    """Bytes at each instant of the blocks of one role, scratch excluded."""
    peak: int
    """Bytes."""
    peak_instant: int
    """First instant at which the peak is reached; -1 for a step without instants."""
    resident: int
    """Bytes on the device before the first instant."""


def at_binding(size: sympy.Expr | int, binding: Mapping[sympy.Symbol, int]) -> int:
    """Bytes of a symbolic size at a binding of its symbols."""
    if isinstance(size, int):
        return size
    return int(size) if size.is_Integer else int(size.subs(binding))


def profile(trace: Trace, binding: Mapping[sympy.Symbol, int] | None = None) -> MemoryProfile:
    """Add up the blocks of `trace` at every instant.

    Args:
        trace: the step.
        binding: the integer of every symbol that occurs in a size.
    """
    binding = binding or {}
    n = len(trace.instants)
    steps: dict[Role, list[int]] = {}
    for block in trace.blocks:
        change = steps.setdefault(block.role, [0] * (n + 1))
        size = at_binding(block.size, binding)
        change[max(block.birth, 0)] += size
        change[min(block.death, n - 1) + 1] -= size
    by_role = {role: tuple(accumulate(change[:n])) for role, change in steps.items()}
    total = tuple(
        at_binding(instant.scratch, binding) + sum(curve[i] for curve in by_role.values())
        for i, instant in enumerate(trace.instants)
    )
    resident = sum(at_binding(b.size, binding) for b in trace.blocks if b.birth == -1)
    peak = max(total, default=resident)
    return MemoryProfile(total, by_role, peak, total.index(peak) if total else -1, resident)


def alive_at(trace: Trace, instant: int) -> tuple[Block, ...]:
    """Blocks that are held at `instant`, in the order in which they were born."""
    return tuple(block for block in trace.blocks if block.birth <= instant <= block.death)
