"""The event trace: which block of memory is held during which instant of a training step.

Both descriptions of a step end here: the *eager* step (followed on fake tensors) and the *planned*
step (live ranges of the rewritten graph). Everything that speaks of memory reads only this.

Definitions.
    (1) An *instant* is the execution of one op. Instants are numbered from 0 in program order.
    (2) A *block* is one storage. It is held during the instants ``birth <= i <= death``. A block that
        an op allocates is born at that op's instant; one that is freed between instants i and i + 1
        dies at i. ``birth == -1``: on the device before the step begins. ``death == len(instants)``:
        still there after the step.
    (3) Bytes at instant i = the sizes of the blocks held at i, plus the instant's scratch.

Not described: addresses, and so fragmentation; order of allocation inside one op (that is in scratch).
"""

from dataclasses import dataclass, field
from enum import StrEnum

import sympy


class Phase(StrEnum):
    """Part of the training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"


class Role(StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENT = "gradient"
    OUTPUT = "output"
    TANGENT = "tangent"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    GENERATOR_STATE = "generator state"
    WORKSPACE = "workspace"


def positive(name: str) -> sympy.Symbol:
    """The symbol for a size that users name: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


@dataclass(frozen=True, slots=True)
class Instant:
    """Execution of one op."""

    name: str
    """Unique in the trace, e.g. ``addmm_3``."""
    target: str
    """The op, e.g. ``aten.addmm.default``."""
    phase: Phase
    scratch: sympy.Expr = sympy.S.Zero
    """Bytes held only while the op executes, beyond the blocks."""
    source: str = ""
    """The user's source line, ``file.py:12``; empty if unknown."""
    module: str = ""
    """Path of the module that called the op, e.g. ``transformer.h.0.attn``; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Block:
    """One storage and the instants during which it is held."""

    name: str
    role: Role
    size: sympy.Expr
    """Bytes."""
    birth: int
    """First instant at which it is held; -1 if it is there before the step."""
    death: int
    """Last instant at which it is held; ``len(instants)`` if it outlives the step."""
    text: str = field(default="", compare=False)
    """Type and shape, such as ``f32[8, 128]``; for people, empty if unknown."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A training step as instants and blocks."""

    instants: tuple[Instant, ...]
    blocks: tuple[Block, ...]
