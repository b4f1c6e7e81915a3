"""A schedule that can be edited: executions are inserted and removed, and the bytes stay exact.

The memory model is that of `problem.py`, (1) to (6). An edit touches the instances that the inserted or
removed executions read and write, and renumbers the positions behind it; nothing else is computed again.
Executions and instances keep their identity while their positions move.

The bytes are kept as two lists of differences, so that an instance costs two additions whatever its life
is; `bytes` adds them up. What this module counts is never believed: the evaluator decides.

Not handled: repetitions behind the last first execution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import sub

from .problem import FORBIDDEN, Problem


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of an op."""

    op: int
    at: int
    """Position in the schedule."""
    first: bool


@dataclass(slots=True, eq=False)
class Instance:
    """One allocation of a storage."""

    storage: int
    writer: Execution
    last: Execution
    """The execution with which it ends."""
    readers: list[Execution] = field(default_factory=list)
    until: Execution | None = None
    """The execution until which it is held; None if it is free."""
    reused: bool = False
    """That execution writes another storage in its place."""


class Timeline:
    """The executions in order, the instances of every storage, and the bytes at every position."""

    def __init__(self, problem: Problem, schedule: Sequence[int]) -> None:
        """The executions of a schedule that the evaluator accepts, connected."""
        self.problem = problem
        seen = [-1, *accumulate(schedule, max)]
        self.order = [Execution(v, at, v > seen[at]) for at, v in enumerate(schedule)]
        self.first = [x for x in self.order if x.first]
        """Per op: its first execution."""
        self.again: list[list[Execution]] = [[] for _ in problem.ops]
        """Per op: its repetitions, in order."""
        self.lives: list[list[Instance]] = [[] for _ in problem.sizes]
        """Per storage: its instances, in order of birth."""
        self.born = [0] * len(self.order)
        """Bytes of the instances that begin at a position."""
        self.ended = [0] * len(self.order)
        """Bytes of the instances that end with a position."""
        self.extra = [
            problem.ops[x.op].scratch + (0 if x.first else problem.ops[x.op].repeat_scratch)
            for x in self.order
        ]
        """Scratch bytes at a position."""
        for execution in self.order:
            self._connect(execution)
        for instances in self.lives:
            for instance in instances:
                self._count(instance)
        self.strict = [x for x in self.first if problem.ops[x.op].absent]
        """First executions at which something must be absent."""
        self.banned = {s: x for x in self.strict for s in problem.ops[x.op].absent}
        """Per storage: where it must be absent."""

    def _connect(self, execution: Execution) -> None:
        """Let the last execution so far read and write."""
        v = execution.op
        if not execution.first:
            self.again[v].append(execution)
        for s in self.problem.ops[v].reads if execution.first else self.reads_again(v):
            if not self.lives[s]:  # a state, which its op writes only for a repetition
                self.lives[s].append(Instance(s, self.first[v], self.first[v]))
            self.lives[s][-1].readers.append(execution)
        for s in self.problem.ops[v].writes:
            held = self.problem.held[s] if execution.first else -1
            until = self.first[min(held, len(self.first) - 1)] if held >= 0 else None
            self.lives[s].append(Instance(s, execution, execution, until=until))

    def schedule(self) -> tuple[int, ...]:
        """Op indices in order of execution."""
        return tuple(execution.op for execution in self.order)

    def bytes(self) -> list[int]:
        """Bytes at every position."""
        change = map(sub, self.born, chain((0,), self.ended))
        alive = accumulate(change, initial=self.problem.resident)
        next(alive)
        total = [held + extra for held, extra in zip(alive, self.extra, strict=True)]
        for execution in self.strict:
            total[execution.at] += FORBIDDEN if self.broken(execution) else 0
        return total

    def bytes_at(self, execution: Execution) -> int:
        """Bytes at one execution."""
        at = execution.at
        held = sum(self.born[: at + 1]) - sum(self.ended[:at])
        forbidden = FORBIDDEN if self.broken(execution) else 0
        return self.problem.resident + held + self.extra[at] + forbidden

    def broken(self, execution: Execution) -> bool:
        """Something is alive that must be absent."""
        return execution.first and any(
            x.writer.at <= execution.at <= x.last.at
            for s in self.problem.ops[execution.op].absent
            for x in self.lives[s]
        )

    def latest(self, s: int, position: int) -> Instance | None:
        """The last instance of a storage that is written before a position."""
        for instance in reversed(self.lives[s]):
            if instance.writer.at < position:
                return instance
        return None

    def reads_again(self, v: int) -> tuple[int, ...]:
        """What a repetition of op v reads."""
        op = self.problem.ops[v]
        return op.reads if op.state is None else (*op.reads, op.state)

    def insert(self, ops: list[int], position: int) -> list[Execution]:
        """Execute ops, in this order, before the execution that is now at a position."""
        made = [Execution(v, position + i, False) for i, v in enumerate(ops)]
        nothing = [0] * len(ops)
        self.order[position:position] = made
        self.born[position:position] = nothing
        self.ended[position:position] = nothing
        self.extra[position:position] = [
            self.problem.ops[v].scratch + self.problem.ops[v].repeat_scratch for v in ops
        ]
        self._renumber(position)
        for execution in made:
            self._attach(execution)
        return made

    def remove(self, execution: Execution) -> None:
        """Take out a repetition: what it wrote is read from the instances before."""
        v = execution.op
        self.again[v].remove(execution)
        for s in self.problem.ops[v].writes:
            at = next(i for i, x in enumerate(self.lives[s]) if x.writer is execution)
            gone, before = self.lives[s].pop(at), self.lives[s][at - 1]
            self._discount(gone)
            self._discount(before)
            before.readers += gone.readers
            self._count(before)
        for s in self.reads_again(v):
            instance = self.latest(s, execution.at)
            assert instance is not None
            self._discount(instance)
            instance.readers.remove(execution)
            if s == self.problem.ops[v].state and not instance.readers:
                self.lives[s].remove(instance)
            else:
                self._count(instance)
        position = execution.at
        for positions in (self.order, self.born, self.ended, self.extra):
            del positions[position]
        self._renumber(position)

    def _attach(self, execution: Execution) -> None:
        """Connect a new repetition to what it reads, and later readers to what it writes."""
        v, position = execution.op, execution.at
        op = self.problem.ops[v]
        behind = next((i for i, x in enumerate(self.again[v]) if x.at > position), None)
        self.again[v].insert(len(self.again[v]) if behind is None else behind, execution)
        for s in self.reads_again(v):
            instance = self.latest(s, position)
            if instance is None:
                instance = Instance(s, self.first[v], self.first[v])
                self.lives[s].append(instance)
            else:
                self._discount(instance)
            instance.readers.append(execution)
            self._count(instance)
        for s in op.writes:
            before = self.latest(s, position)
            assert before is not None
            self._discount(before)
            new = Instance(s, execution, execution, [r for r in before.readers if r.at > position])
            before.readers = [r for r in before.readers if r.at < position]
            self.lives[s].insert(self.lives[s].index(before) + 1, new)
            self._count(before)
            self._count(new)

    def _count(self, instance: Instance) -> None:
        """Add the bytes of an instance over its life."""
        size = self.problem.sizes[instance.storage]
        last = instance.writer
        if instance.until is not None and instance.until.at > last.at:
            last = instance.until
        for reader in instance.readers:
            if reader.at > last.at:
                last = reader
        instance.last = last
        held = instance.until is not None and self.problem.held[instance.storage] > last.op
        instance.reused = (
            last.first
            and self._in_place(instance.storage, last.op)
            and not held
            and last in instance.readers
        )
        self.born[instance.writer.at] += size
        self._end(instance, size)

    def _discount(self, instance: Instance) -> None:
        """Take the bytes of an instance out again."""
        size = self.problem.sizes[instance.storage]
        self.born[instance.writer.at] -= size
        self._end(instance, -size)

    def _end(self, instance: Instance, size: int) -> None:
        """What is written in its place counts as born with that much less."""
        if instance.reused:
            self.born[instance.last.at] -= size
        else:
            self.ended[instance.last.at] += size

    def _in_place(self, s: int, v: int) -> bool:
        """The first execution of v may write in place of s."""
        return any(a == s for a, _ in self.problem.ops[v].reuse)

    def _renumber(self, position: int) -> None:
        """Give the executions from a position on their positions."""
        for at in range(position, len(self.order)):
            self.order[at].at = at
