"""The tensors of a planned step: which result lives in which storage when, and what was decided of it.

Definition. A *result* is what one op writes into one storage. It lives from that op's instant until its
storage dies or another op writes over it (in-place reuse: `Op.overwrites`). The results of a storage follow
each other without a gap, so bytes at an instant are those of the storages, and every result has an op, a
source line and a fate of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.ir import Block, Graph, Op, OutputKind, Role, Trace
from remat.passes import Patterns, demands

from .planned import Planned
from .views.step_report import NOT_NEEDED, RECOMPUTED, SAVED, HeldTensor

Decision = tuple[str, str]
"""What becomes of a result, and why."""


def planned_tensors(planned: Planned, times: Sequence[int]) -> tuple[HeldTensor, ...]:
    """Every result of a planned step, and every block that is there before the step or beside the graph.

    Args:
        planned: a plan that does not run the model as it is.
        times: predicted for each instant, nanoseconds.
    """
    emitted = planned.emitted
    assert emitted is not None
    graph, trace = emitted.graph, planned.trace
    why = _Why(planned, graph)
    tensors: list[HeldTensor] = []
    for storage, results in enumerate(_results(graph)):
        tensors += _of_storage(storage, results, trace, why, times, len(tensors))
    beside = trace.blocks[len(graph.storages) :]
    return (*tensors, *(tensor_of(block, trace) for block in beside))


def tensor_of(block: Block, trace: Trace, decision: Decision = ("", "")) -> HeldTensor:
    """A block of a trace as a row."""
    maker = trace.instants[block.birth] if block.birth >= 0 else None
    return HeldTensor(
        name=block.name,
        role=block.role.value,
        bytes=int(block.size),
        birth=block.birth,
        death=block.death,
        text=block.text,
        op=maker.target if maker else "",
        module=maker.module if maker else _module_of(block.role, block.name),
        source=maker.source if maker else "",
        decision=decision[0],
        reason=decision[1],
    )


def _module_of(role: Role, name: str) -> str:
    """The module that a tensor from before the step belongs to; empty if it is none's."""
    if role not in (Role.PARAMETER, Role.BUFFER, Role.GRADIENT):
        return ""
    return name.removesuffix(".grad").rpartition(".")[0]


@dataclass(slots=True)
class _Result:
    """One result in one storage."""

    number: int
    """Of the op in the graph; -1: an input."""
    op: Op | None
    reader: Op | None = None
    """The first op of backward that reads it."""


def _results(graph: Graph) -> list[list[_Result]]:
    """The results of every storage, in order."""
    results = [[_Result(-1, None)] for _ in graph.storages]
    for number, op in enumerate(graph.ops):
        if number > graph.border and not graph.is_alias(op):
            for value in op.operands:
                for storage in graph.values[value].storages:
                    now = results[storage][-1]
                    now.reader = now.reader or op
        for storage in op.allocates:
            results[storage] = [_Result(number, op)]
        for storage in op.overwrites:
            results[storage].append(_Result(number, op))
    return results


class _Why:
    """Names and decisions, from the plan and the graphs that it was made of."""

    def __init__(self, planned: Planned, graph: Graph) -> None:
        emitted = planned.emitted
        assert emitted is not None
        original = planned.prepared.graph
        self.graph = graph
        loss = planned.prepared.loss
        self._loss_instants = len(loss.trace.instants) if loss else 1
        self._origins = emitted.rewritten.origins()
        self._again = set(self._origins.values())
        self._pinned = {op.name: op.pinned for op in original.ops}
        self._demanded = _demanded(original, planned)
        self.names, self.gradients = _names(planned, graph)

    def instant(self, number: int) -> int:
        """At which an op of the graph executes; the loss stands where the border is."""
        return number if number <= self.graph.border else number + self._loss_instants - 1

    def decision(self, result: _Result, role: Role) -> Decision:
        """What becomes of a result that an op has made."""
        op, reader = result.op, result.reader
        if op is None or result.number == self.graph.border:
            return "", ""
        if op.name in self._origins:
            return RECOMPUTED, f"made again for {reader.name}" if reader else "made again"
        if result.number > self.graph.border:
            return "", ""
        repeated = op.name in self._again
        if reader is None and repeated:
            demand = "; demanded" if op.name in self._demanded else ""
            return (
                RECOMPUTED,
                f"freed after its last use in forward, made again by backward{demand}",
            )
        if reader is None and role is Role.OUTPUT:
            return "", "an output of the model"
        if reader is None:
            return NOT_NEEDED, "backward does not read it"
        return SAVED, self._why_saved(op, reader, repeated)

    def _why_saved(self, op: Op, reader: Op, repeated: bool) -> str:
        if op.name in self._demanded:
            return f"demanded; {reader.name} reads it"
        if self._pinned.get(op.name):
            return f"cannot be computed again: {self._pinned[op.name]}"
        if repeated:
            return f"kept for {reader.name}; freed then, and made again later"
        if reader.name in self._origins:
            return f"recomputation starts from it ({reader.name})"
        return f"kept for {reader.name}"


def _demanded(original: Graph, planned: Planned) -> frozenset[str]:
    """Names of the ops that the user's patterns match."""
    patterns = planned.plan.patterns
    if patterns == Patterns():
        return frozenset()
    found = demands(original, patterns, planned.plan.protocol)
    ops = {original.ops[i].name for i in found.saved}
    ops |= {op.name for op in original.ops if set(op.allocates) & found.absent}
    return frozenset(ops)


def _names(planned: Planned, graph: Graph) -> tuple[dict[int, str], dict[int, str]]:
    """The user's name of a parameter or buffer, by storage; and of what a gradient belongs to."""
    names: dict[int, str] = {}
    placeholders: dict[str, str] = {}
    inputs = planned.prepared.signature.inputs
    for value, (name, _) in zip(graph.inputs, inputs, strict=False):  # constants come after
        placeholders[graph.values[value].name] = name
        for storage in graph.values[value].storages:
            names.setdefault(storage, name)
    gradients: dict[int, str] = {}
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            for storage in graph.values[output.value].storages:
                name = placeholders.get(output.target, output.target)
                gradients.setdefault(storage, f"{name}.grad")
    return names, gradients


def _of_storage(
    storage: int,
    results: Sequence[_Result],
    trace: Trace,
    why: _Why,
    times: Sequence[int],
    first: int,
) -> list[HeldTensor]:
    """The results of one storage, each written over the one before.

    Args:
        storage: index in the graph, and of its block in the trace.
        results: of it.
        trace: the step.
        why: names and decisions.
        times: see `planned_tensors`.
        first: number of the first result among all tensors.
    """
    block = trace.blocks[storage]
    starts = [block.birth, *(why.instant(result.number) for result in results[1:])]
    ends = [*(start - 1 for start in starts[1:]), block.death]
    tensors = []
    for k, (result, birth, death) in enumerate(zip(results, starts, ends, strict=True)):
        value = why.graph.values[result.op.result] if result.op and k else None
        name = why.names.get(storage) or (value.name if value else block.name)
        if k == len(results) - 1:
            name = why.gradients.get(storage, name)
        text = value.text if value else block.text
        lives = replace(block, name=name, birth=birth, death=death, text=text)
        decision = why.decision(result, block.role)
        tensor = tensor_of(lives, trace, decision)
        time = times[birth] if decision[0] else 0
        tensors.append(replace(tensor, recompute_ns=time, over=first + k - 1 if k else -1))
    return tensors
