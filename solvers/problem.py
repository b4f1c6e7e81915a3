"""The rematerialization problem and its answers, as plain integers.

A program executes n ops in a fixed order of first executions, ``0 .. n-1``. Any op that is a
*candidate* may be executed again later. A *schedule* is the sequence of executions: op indices, in
which the first occurrences appear in the order ``0, 1, .., n-1``.

Memory of a schedule.
    (1) An execution of op v allocates a new instance of every storage in ``writes``.
    (2) An execution of v reads, for each storage in ``reads``, its most recent instance, which must
        still exist: it is enough that one was written before. A second or later execution of v also
        reads ``state``.
    (3) An instance lives from the execution that writes it to its last read; the *first* instance of
        a storage s with ``held[s] >= 0`` lives at least until the first execution of op ``held[s]``
        (``held[s] == n``: to the end of the program). An instance that is never read lives during the
        execution that writes it.
    (4) ``state`` of op v is a storage that only v's first execution writes, and only if a later
        execution of v reads it (a generator state, kept so that a random op can be repeated). If v is
        executed once, it is never allocated.
    (5) For each pair (a, b) in ``reuse`` of op v: if the first execution of v is the last read of the
        instance of a that it reads, and nothing holds that instance beyond it, then b is written in place
        of it. The life of a ends where that of b begins: the block counts once. A repetition reuses nothing.
    (6) Bytes while an execution of v runs = ``resident`` + sizes of the instances alive + ``scratch``
        of v (+ ``repeat_scratch`` of v if it is not its first execution; + `FORBIDDEN` if it is, and an
        instance of a storage in ``absent`` is alive).
    (7) The peak is the maximum of (6) over the schedule; a schedule is feasible if its peak is at
        most the budget. Its cost is the sum of ``cost`` over the executions that are not first.

The solver minimises the cost over feasible schedules. No torch, no sympy.
"""

from dataclasses import dataclass
from enum import StrEnum

FORBIDDEN = 2**60
"""Bytes that an execution takes on top if something is alive that must be absent: more than any budget, so
that a hard constraint needs no second notion of feasibility."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op: what it reads, what it writes, what it costs to execute it again."""

    cost: int
    """Time of one execution, in the problem's unit of time, >= 0."""
    reads: tuple[int, ...]
    """Storages that must be resident while it executes, each once, ascending."""
    writes: tuple[int, ...]
    """Storages that it allocates, each once, ascending. Every storage is written by at most one op."""
    scratch: int = 0
    """Bytes held only while it executes, beyond what it reads and writes."""
    candidate: bool = True
    """May be executed again."""
    state: int | None = None
    """Storage of the generator state that a repetition needs; in no other op's reads or writes."""
    repeat_scratch: int = 0
    """Further bytes held only while a second or later execution runs."""
    absent: tuple[int, ...] = ()
    """Storages no instance of which may be alive while it first executes, as what the user wants recomputed
    is not during the border. Of more than 0 bytes each, and each absent from one op at most."""
    reuse: tuple[tuple[int, int], ...] = ()
    """Pairs (a, b) of storages of one size, a in reads and b in writes, each in one pair at most: b may take
    the place of a."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Find the cheapest schedule whose peak is at most the budget."""

    ops: tuple[Op, ...]
    """In order of first execution."""
    sizes: tuple[int, ...]
    """Bytes of each storage."""
    held: tuple[int, ...]
    """Per storage: the op until whose first execution it stays, ``len(ops)`` for the end, -1 if free."""
    resident: int
    """Bytes on the device throughout."""
    budget: int
    """Cap on the peak, bytes."""

    @property
    def baseline_cost(self) -> int:
        """Time of executing every op once."""
        return sum(op.cost for op in self.ops)

    @property
    def bound_class(self) -> "BoundClass":
        """The class of programs that the schedules stand for."""
        reuse = any(op.reuse for op in self.ops)
        return BoundClass.FIXED_ORDER_IN_PLACE if reuse else BoundClass.FIXED_ORDER


class Status(StrEnum):
    """What is known of a solution."""

    OPTIMAL = "optimal"
    """Its cost equals the bound, up to the gap that was asked for."""
    FEASIBLE = "feasible"
    """Fits the budget; a deterministic limit was reached before the gap was proven."""
    TIME_LIMIT = "time limit"
    """Fits the budget; the clock stopped the search, so another run may answer differently."""
    INFEASIBLE = "infeasible"
    """Proven: no schedule fits the budget."""
    UNKNOWN = "unknown"
    """No schedule was found, and none was proven impossible."""


class BoundClass(StrEnum):
    """The class of programs for which a bound holds."""

    FIXED_ORDER = "given order of first executions, any recomputation"
    FIXED_ORDER_IN_PLACE = "given order of first executions, any recomputation, in-place reuse"
    STAGED = (
        "given order of first executions, in-place reuse where it is allowed; between two first "
        "executions, ops are repeated in program order, each at most once"
    )
    ANY_ORDER = (
        "any order of first executions, any recomputation, in-place reuse where it is allowed"
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop."""

    time_s: float = 60.0
    """Wall clock, seconds; only aborts."""
    gap: float = 0.0
    """Stop when cost - bound <= gap * baseline cost. 0.01 is one point of step time."""


DEFAULT_LIMITS = Limits()
"""A minute, and a proof."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, and what is proven of it."""

    status: Status
    schedule: tuple[int, ...]
    """Op indices in order of execution; empty if none was found."""
    cost: int
    """Time of the executions that are not first, in the problem's unit; 0 if none was found."""
    peak: int
    """Bytes, by the evaluator; 0 if none was found."""
    bound: float
    """No feasible schedule of the class costs less (``inf`` if proven infeasible)."""
    bound_class: BoundClass = BoundClass.FIXED_ORDER

    def gap(self, problem: Problem) -> float:
        """(cost - bound) as a fraction of the baseline cost."""
        base = problem.baseline_cost
        return max(0.0, self.cost - self.bound) / base if base else 0.0
