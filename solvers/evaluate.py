"""Independent evaluator: the peak and the cost of a schedule, in exact integers.

It computes what `problem.py` defines under (1) to (7), from the schedule alone: every execution makes
instances, every read extends the life of the most recent one, and the sizes of the instances alive are
added up at every execution. No solver is believed; each one's schedule ends here.

Not handled: the order of allocations inside one execution (that is the op's scratch), addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.ir import VerifyError

from .problem import FORBIDDEN, Problem


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a schedule takes."""

    peak: int
    """Bytes, the maximum of `bytes`; the resident bytes for an empty schedule."""
    peak_at: int
    """Index in the schedule at which the peak is first reached; -1 for an empty schedule."""
    cost: int
    """Time of the executions that are not first, in the problem's unit."""
    bytes: tuple[int, ...]
    """Bytes while each execution runs."""
    feasible: bool
    """The peak is at most the budget."""


@dataclass(slots=True)
class Instance:
    """One allocation of a storage: positions in the schedule between which it is alive.

    The death of one that is held to the end of the program is the length of the schedule.
    """

    storage: int
    birth: int
    death: int
    reused: bool = False
    """The execution that follows its death reads it too, and writes another storage in its place."""


def evaluate(problem: Problem, schedule: Sequence[int]) -> Evaluation:
    """Peak, cost and bytes at every execution.

    Args:
        problem: the ops, sizes and holds.
        schedule: op indices in order of execution.

    Raises:
        VerifyError: the schedule is none of this problem; the message names the execution.
    """
    first = _first_positions(problem, schedule)
    length = len(schedule)
    change = [0] * (length + 2)
    banned = {s: v for v, op in enumerate(problem.ops) for s in op.absent}
    broken: set[int] = set()
    for instance in instances(problem, schedule):
        change[instance.birth] += problem.sizes[instance.storage]
        change[instance.death + 1] -= problem.sizes[instance.storage]
        at = first[banned[instance.storage]] if instance.storage in banned else -1
        if instance.birth <= at <= instance.death:
            broken.add(at)
    alive = accumulate(change[:length], initial=problem.resident)
    next(alive)
    total: list[int] = []
    cost = 0
    for position, (v, held) in enumerate(zip(schedule, alive, strict=True)):
        op = problem.ops[v]
        repetition = position != first[v]
        total.append(held + op.scratch + (op.repeat_scratch if repetition else 0))
        total[-1] += FORBIDDEN if position in broken else 0
        cost += op.cost if repetition else 0
    peak = max(total, default=problem.resident)
    at = total.index(peak) if total else -1
    return Evaluation(peak, at, cost, tuple(total), peak <= problem.budget)


def excesses(problem: Problem, schedule: Sequence[int]) -> list[tuple[int, int, int]]:
    """Executions during which the bytes exceed the budget, worst first.

    Returns:
        Per execution (bytes above the budget, the next op to be executed for the first time, the op that is
        executed); the two ops are the same if it is a first execution.
    """
    found: list[tuple[int, int, int]] = []
    seen = 0
    for v, used in zip(schedule, evaluate(problem, schedule).bytes, strict=True):
        if used > problem.budget:
            found.append((used - problem.budget, seen, v))
        seen += v == seen
    return sorted(found, key=lambda item: (-item[0], item[1], item[2]))


def _first_positions(problem: Problem, schedule: Sequence[int]) -> list[int]:
    """Position of each op's first execution; checks their order and who is repeated."""
    n = len(problem.ops)
    first: list[int] = []
    for position, v in enumerate(schedule):
        if not 0 <= v < n:
            raise VerifyError(
                f"execution {position} is of op {v}; the problem has ops 0 to {n - 1}"
            )
        if v > len(first):
            raise VerifyError(
                f"execution {position} is the first of op {v}, before that of op {len(first)}; "
                "first executions must follow program order"
            )
        if v == len(first):
            first.append(position)
        elif not problem.ops[v].candidate:
            raise VerifyError(f"execution {position} repeats op {v}, which is not a candidate")
    if len(first) < n:
        raise VerifyError(f"the schedule ends before op {len(first)} of {n} is executed")
    return first


def instances(problem: Problem, schedule: Sequence[int]) -> list[Instance]:
    """Every instance with its life, in order of birth.

    Raises:
        VerifyError: as `evaluate`.
    """
    first = _first_positions(problem, schedule)
    repeated = [False] * len(problem.ops)
    for position, v in enumerate(schedule):
        repeated[v] = repeated[v] or position != first[v]
    made: list[Instance] = []
    read_first: list[tuple[Instance, int]] = []
    """Instances that a first execution may reuse, and its position."""
    latest: list[Instance | None] = [None] * len(problem.sizes)
    for position, v in enumerate(schedule):
        op = problem.ops[v]
        is_first = position == first[v]
        reads, writes = op.reads, op.writes
        if op.state is not None and not is_first:
            reads = (*reads, op.state)
        if op.state is not None and is_first and repeated[v]:
            writes = (*writes, op.state)
        for s in reads:
            instance = latest[s]
            if instance is None:
                raise VerifyError(
                    f"execution {position} (op {v}) reads storage {s}, which was not written before"
                )
            instance.death = max(instance.death, position)
            if is_first and any(s == a for a, _ in op.reuse):
                read_first.append((instance, position))
        for s in writes:
            new = latest[s] = Instance(s, position, position)
            made.append(new)
            if is_first:
                new.death = max(position, _hold_end(problem, schedule, first, s))
    for instance, position in read_first:
        if instance.death == position:
            instance.death, instance.reused = position - 1, True
    return made


def _hold_end(problem: Problem, schedule: Sequence[int], first: Sequence[int], s: int) -> int:
    """Last position at which the first instance of storage s must be there; -1 if it is free."""
    held = problem.held[s]
    if held < 0:
        return -1
    return first[held] if held < len(problem.ops) else len(schedule)
