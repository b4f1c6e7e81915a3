"""Emission: a schedule to graphs that run, and to the trace that says what they hold.

The rewritten program decides: its live ranges, not the solver's belief, give the peak.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from remat.ir import Block, Graph, Op, OutputKind, Trace
from remat.ir.domain import Sizes
from remat.ir.lift import Measured

from .formulate import Index
from .liveness import LiveRanges, holders, live_ranges, planned_trace
from .outside_loss import with_loss
from .plan import Tensor
from .prepare import Prepared, resized
from .protocol import StepProtocol
from .randomness import repeat_random, state_bytes
from .reuse import reused
from .rewrite import REPEATS, Rewritten, rewrite_joint
from .whole_step import whole_step


@dataclass(frozen=True, slots=True)
class Emitted:
    """A schedule as a program."""

    prepared: Prepared
    rewritten: Rewritten
    graph: Graph
    """The rewritten joint graph, lifted."""
    ranges: LiveRanges
    trace: Trace
    """Forward, backward and optimizer step."""
    steps: tuple[str, ...]
    """Names of ops in order of execution."""
    stage_ends: tuple[str, ...]
    protocol: StepProtocol
    extra: tuple[Block, ...]
    """Blocks that are resident beside the graph's inputs, whatever the sizes."""
    optimizer: Trace | None


def emit_schedule(
    prepared: Prepared,
    index: Index,
    schedule: Sequence[int],
    protocol: StepProtocol,
    *,
    extra: Sequence[Block] = (),
    optimizer: Trace | None = None,
) -> Emitted:
    """Write a schedule out, and find out what it holds when.

    Args:
        prepared: the step.
        index: from `formulate`.
        schedule: problem ops in order of execution.
        protocol: what the caller keeps.
        extra: blocks that are resident beside the graph's inputs and the loss's targets.
        optimizer: one steady-state optimizer step.
    """
    original = prepared.graph
    over = reused(original, [index.ops[op] for op in schedule])
    rewritten = rewrite_joint(prepared.capture.joint, original, index, schedule, over)
    graph, ranges, trace = held_by(rewritten, prepared, protocol, extra, optimizer)
    return Emitted(
        prepared,
        rewritten,
        graph,
        ranges,
        trace,
        tuple(original.ops[index.ops[op]].name for op in schedule),
        tuple(original.ops[op].name for op in index.stage_ends),
        protocol,
        tuple(extra),
        optimizer,
    )


def emitted_at(emitted: Emitted, sizes: Sizes) -> Emitted:
    """The same program at other sizes: what it holds there, and what its kernels take there."""
    if sizes == emitted.prepared.sizes:
        return emitted
    prepared, rewritten = resized(emitted.prepared, sizes), emitted.rewritten
    graph, ranges, trace = held_by(
        rewritten, prepared, emitted.protocol, emitted.extra, emitted.optimizer
    )
    return replace(emitted, prepared=prepared, graph=graph, ranges=ranges, trace=trace)


def held_by(
    rewritten: Rewritten,
    prepared: Prepared,
    protocol: StepProtocol,
    extra: Sequence[Block],
    optimizer: Trace | None,
) -> tuple[Graph, LiveRanges, Trace]:
    """A rewritten graph, lifted; its live ranges; and the trace of the whole step.

    Args:
        rewritten: the graph, and which stage delivers which gradient.
        prepared: the step that it was rewritten from, at its sizes, with its loss.
        protocol: see `emit_schedule`, likewise the others.
        extra: resident blocks.
        optimizer: the optimizer step.
    """
    graph = prepared.lift(rewritten.joint, rewritten.border, _measured(rewritten, prepared))
    ranges = live_ranges(graph, holders(graph, protocol, _delivered(graph, rewritten)))
    trace = planned_trace(graph, ranges)
    if prepared.loss is not None:
        trace = with_loss(trace, graph, prepared.loss)
    return graph, ranges, whole_step(trace, (*extra, *prepared.targets), optimizer)


def _measured(rewritten: Rewritten, prepared: Prepared) -> dict[str, Measured]:
    """Scratch of every node: what its original has, and the present generator state in a repetition."""
    found: dict[str, Measured] = {}
    kept = sympy.Integer(state_bytes(str(prepared.device)))
    for node in rewritten.joint.graph.nodes:
        origin = node.meta.get(REPEATS, node.name)
        measured = prepared.measured.get(origin, Measured())
        if node.target is repeat_random:
            measured = replace(measured, scratch=measured.scratch + kept)
        found[node.name] = measured
    return found


def _delivered(graph: Graph, rewritten: Rewritten) -> dict[int, int]:
    """Gradient storage -> op of the rewritten graph that ends the stage that delivers it."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    return {
        storage: position[rewritten.stage_ends[rewritten.delivered[output.target]]]
        for output in graph.outputs
        if output.kind is OutputKind.GRADIENT
        for storage in graph.values[output.value].storages
    }


def saved_tensors(emitted: Emitted) -> tuple[Tensor, ...]:
    """Activations that backward finds kept: alive at the border, read after it."""
    graph, border = emitted.graph, emitted.graph.border
    read_later = {
        storage
        for op in graph.ops[border + 1 :]
        for value in op.operands
        for storage in graph.values[value].storages
    }
    written = {s: op for op in graph.ops[:border] for s in (*op.allocates, *op.overwrites)}
    return tuple(
        _tensor(graph, op, storage) for storage, op in written.items() if storage in read_later
    )


def overwriting_ops(emitted: Emitted) -> tuple[str, ...]:
    """Names of the ops that write their result over an operand."""
    return tuple(op.name for op in emitted.graph.ops if op.overwrites)


def repeated_tensors(emitted: Emitted) -> tuple[Tensor, ...]:
    """Storages that repetitions make again, once for each repetition."""
    counted = Counter(emitted.steps)
    graph = emitted.graph
    repeats = {node.name for node in emitted.rewritten.joint.graph.nodes if REPEATS in node.meta}
    assert sum(counted.values()) - len(counted) == len(repeats)
    return tuple(
        _tensor(graph, op, storage)
        for op in graph.ops
        if op.name in repeats
        for storage in op.allocates
    )


def _tensor(graph: Graph, op: Op, storage: int) -> Tensor:
    found, result = graph.storages[storage], graph.values[op.result]
    name = result.name if storage in op.overwrites else found.name
    return Tensor(name, result.text, int(found.size), op.target, op.source, op.module)
