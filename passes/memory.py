"""Memory profile: bytes held at every instant of a trace, by role, and their peak.

Definition. Bytes at instant i = sizes of the blocks with ``birth <= i <= death``, plus the scratch of
i. The peak is the maximum over i; the instant where it is first reached is `peak_instant`.

Sizes are taken at one binding of the symbols. The symbolic peak (a `Max` of polynomials) is not made
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


class _Sizes(dict[sympy.Expr, int]):
    """Sizes at a binding; each distinct one is computed once."""

    def __init__(self, binding: Mapping[sympy.Symbol, int]) -> None:
        super().__init__()
        self._binding = binding

    def __missing__(self, size: sympy.Expr) -> int:
        self[size] = at_binding(size, self._binding)
        return self[size]


def profile(trace: Trace, binding: Mapping[sympy.Symbol, int] | None = None) -> MemoryProfile:
    """Add up the blocks of `trace` at every instant.

    Args:
        trace: the step.
        binding: the integer of every symbol that occurs in a size.
    """
    bytes_of = _Sizes(binding or {})
    n = len(trace.instants)
    steps: dict[Role, list[int]] = {}
    for block in trace.blocks:
        change = steps.setdefault(block.role, [0] * (n + 1))
        size = bytes_of[block.size]
        change[max(block.birth, 0)] += size
        change[min(block.death, n - 1) + 1] -= size
    by_role = {role: tuple(accumulate(change[:n])) for role, change in steps.items()}
    total = tuple(
        bytes_of[instant.scratch] + sum(curve[i] for curve in by_role.values())
        for i, instant in enumerate(trace.instants)
    )
    resident = sum(bytes_of[b.size] for b in trace.blocks if b.birth == -1)
    peak = max(total, default=resident)
    return MemoryProfile(total, by_role, peak, total.index(peak) if total else -1, resident)


def with_numbers(trace: Trace, binding: Mapping[sympy.Symbol, int]) -> Trace:
    """The trace with numbers for sizes."""
    bytes_of = _Sizes(binding)
    return Trace(
        tuple(replace(i, scratch=sympy.Integer(bytes_of[i.scratch])) for i in trace.instants),
        tuple(replace(b, size=sympy.Integer(bytes_of[b.size])) for b in trace.blocks),
    )


def alive_at(trace: Trace, instant: int) -> tuple[Block, ...]:
    """Blocks that are held at `instant`, in the order in which they were born."""
    return tuple(block for block in trace.blocks if block.birth <= instant <= block.death)
