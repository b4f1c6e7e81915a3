"""The graph: a training step's forward and backward as ops over values that share storages.

Definitions.
    (1) A *storage* is one block of memory; its size in bytes may be symbolic.
    (2) A *value* is what one op yields, or one input of the step. It refers to the storages of all
        tensors in it: none (an integer), one (a tensor), several (a tuple of tensors). Views of a
        tensor are values that refer to the same storage.
    (3) An *op* reads operands, yields one value, and allocates the storages that are new in it. An op
        that yields tensors and allocates nothing is an *alias*: a view, or `getitem`.
    (4) Ops stand in program order: forward, one *border* op, backward. The border stands for all
        that happens between the two graphs: it reads the outputs that receive a gradient and
        allocates the tangents; a loss outside the model is its scratch.

    (5) An op may *overwrite* the storage of an operand with its result, in a rewritten graph only. From
        there on the values that referred to the storage before are not read.

Apart from (5) the graph is functional: every storage is written by exactly one op, or is an input. In-place
updates of buffers and inputs are outputs of kind MUTATION; the copy into place happens outside the graph.

No torch in here; `ir.lift` makes graphs from torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import sympy

from .trace import Phase, Role

BORDER = "remat.border"
"""Target of the border op."""
LOSS = "loss"
"""Name of the storage of a loss outside the model."""
ROOT_GRADIENT = "root gradient"
"""Name of the storage of the gradient that the backward of such a loss starts from."""


class OutputKind(StrEnum):
    """Why a value leaves the graph."""

    RESULT = "result"
    MUTATION = "mutation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory."""

    name: str
    role: Role
    size: sympy.Expr
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Value:
    """What one op yields, or one input."""

    name: str
    storages: tuple[int, ...]
    """Indices into `Graph.storages`, each once, in order of appearance."""
    text: str = ""
    """Type and shape, such as ``f32[8, 128]``; for people."""


@dataclass(frozen=True, slots=True)
class Op:
    """Execution of one operator in program order."""

    name: str
    target: str
    phase: Phase
    operands: tuple[int, ...]
    """Values read, each once, in order of appearance."""
    result: int
    """The value yielded."""
    allocates: tuple[int, ...]
    """Storages that are new in the result."""
    scratch: sympy.Expr = sympy.S.Zero
    """Bytes that the kernel holds only while it runs, beyond the storages."""
    random: bool = False
    """Draws from the global generator."""
    pinned: str = ""
    """Why it may not be executed again; empty if it may."""
    source: str = ""
    """The user's source line, ``file.py:12``."""
    module: str = ""
    """Path of the module that called it."""
    overwritable: tuple[int, ...] = ()
    """Operands in whose place its kernel could write the result."""
    overwrites: tuple[int, ...] = ()
    """Storages of operands in whose place it does."""


@dataclass(frozen=True, slots=True)
class Output:
    """A value that leaves the graph."""

    value: int
    kind: OutputKind
    target: str
    """Name of the output, of the tensor that is updated, or of the parameter whose gradient it is."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A joint forward and backward graph."""

    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    """Values of the primals, in order. Tangents are the border's to allocate."""
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    symbols: Mapping[sympy.Symbol, int]
    """Every symbol that occurs in a size, with its value in the example."""

    def is_alias(self, op: Op) -> bool:
        """The op yields tensors and allocates nothing: a view, or `getitem`."""
        new = op.allocates or op.overwrites
        return not new and op.target != BORDER and bool(self.values[op.result].storages)

    @property
    def border(self) -> int:
        """Index of the border op."""
        return next(i for i, op in enumerate(self.ops) if op.target == BORDER)
