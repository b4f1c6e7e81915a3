"""What a step's memory consists of: its peak in every phase, and who holds the bytes there.

Definitions. The *composition* at an instant splits its bytes by role; scratch counts as temporary. A
*holder* is all blocks of one role that were born by the same op of the same source line in modules that
differ in numbers only (``layers.0.mlp``, ``layers.1.mlp``: folded to ``layers.*.mlp``); blocks from
before the step are held under their folded names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from remat.ir import Block, Phase, Role, Trace

from .memory import MemoryProfile, alive_at, at_binding, profile


@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks alike that are held at one instant."""

    role: Role
    module: str
    """Folded path of the module whose op made them; the folded name of blocks from before the step."""
    op: str
    """The op that made them; empty for blocks from before the step."""
    source: str
    """The user's line, ``file.py:12``; empty if unknown."""
    blocks: int
    """Number of blocks."""
    bytes: int


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The largest instant of one phase, at one binding."""

    phase: Phase
    bytes: int
    """On the device at that instant."""
    instant: int
    op: str
    """What executes then."""
    module: str
    source: str
    by_role: Mapping[Role, int]
    """Bytes by role; scratch counts as temporary."""
    holders: tuple[Holder, ...]
    """The most bytes first."""


def phase_peaks(trace: Trace, binding: Mapping[sympy.Symbol, int]) -> tuple[PhasePeak, ...]:
    """The largest instant of every phase that the trace has, in order of the phases."""
    found = profile(trace, binding)
    peaks = []
    for phase in Phase:
        members = [i for i, instant in enumerate(trace.instants) if instant.phase is phase]
        if members:
            peaks.append(_peak(trace, binding, found, max(members, key=found.bytes.__getitem__)))
    return tuple(peaks)


def _peak(
    trace: Trace, binding: Mapping[sympy.Symbol, int], found: MemoryProfile, instant: int
) -> PhasePeak:
    at = trace.instants[instant]
    by_role = {role: curve[instant] for role, curve in found.by_role.items() if curve[instant]}
    scratch = at_binding(at.scratch, binding)
    if scratch:
        by_role[Role.TEMPORARY] = by_role.get(Role.TEMPORARY, 0) + scratch
    return PhasePeak(
        phase=at.phase,
        bytes=found.bytes[instant],
        instant=instant,
        op=at.target,
        module=at.module,
        source=at.source,
        by_role={role: by_role[role] for role in Role if role in by_role},
        holders=holders_at(trace, binding, instant),
    )


def holders_at(
    trace: Trace, binding: Mapping[sympy.Symbol, int], instant: int
) -> tuple[Holder, ...]:
    """Who holds the bytes of one instant, the most bytes first."""
    groups: dict[tuple[Role, str, str, str], list[int]] = {}
    for block in alive_at(trace, instant):
        size = at_binding(block.size, binding)
        if size:
            groups.setdefault(_group(trace, block), []).append(size)
    scratch = at_binding(trace.instants[instant].scratch, binding)
    if scratch:
        at = trace.instants[instant]
        key = (Role.TEMPORARY, fold(at.module), f"inside {at.target}", at.source)
        groups.setdefault(key, []).append(scratch)
    holders = [Holder(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
    return tuple(sorted(holders, key=lambda holder: -holder.bytes))


def _group(trace: Trace, block: Block) -> tuple[Role, str, str, str]:
    if block.birth < 0 or block.role in (Role.GRADIENT, Role.OPTIMIZER_STATE):
        return block.role, fold(block.name), "", ""
    born = trace.instants[block.birth]
    return block.role, fold(born.module), born.target, born.source


def retained(trace: Trace) -> tuple[Block, ...]:
    """Activations at the border: those that backward finds when it begins.

    With several forwards and backwards, at the first border.
    """
    border = next(
        (i for i, instant in enumerate(trace.instants) if instant.phase is not Phase.FORWARD), -1
    )
    if border < 0:
        return ()
    held = alive_at(trace, border - 1)
    return tuple(b for b in held if b.role is Role.ACTIVATION and b.death >= border)


def fold(name: str) -> str:
    """The name with ``*`` for every number between dots and at the end: one name for layers alike."""
    return re.sub(r"(?<![^._])\d+(?=[._]|$)", "*", name)
