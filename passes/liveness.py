"""Live ranges of a graph's storages, and the trace of the planned step.

Definitions. Ops are numbered in program order, 0 to n - 1.
    (1) A value is used by the ops that read it; it is dropped after its last use, or after its
        definition if it has none.
    (2) The live range of a storage is [definition, last use] over all values that refer to it.
    (3) Ranges are extended by whoever else holds the storage: parameters, buffers and inputs live
        throughout; results and gradients as `holders` says.

This is memory liveness. (In MLIR "liveness" asks whether a value is needed at all.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from remat.ir import LOSS, ROOT_GRADIENT, Block, Graph, Instant, OutputKind, Role, Trace

from .protocol import StepProtocol


@dataclass(frozen=True, slots=True)
class LiveRanges:
    """First and last op during which each storage is held."""

    birth: tuple[int, ...]
    """Per storage, op index; -1: before the step."""
    death: tuple[int, ...]
    """Per storage, op index; n: it outlives backward."""


def holders(graph: Graph, protocol: StepProtocol, delivered: Mapping[int, int]) -> dict[int, int]:
    """Storages that something beside the ops holds, and the last op during which it does.

    Args:
        graph: the joint graph.
        protocol: what the caller keeps.
        delivered: gradient storage -> last op of the stage that delivers it to autograd.
    """
    n, border = len(graph.ops), graph.border
    loss_inside = not any(s.name == LOSS for s in graph.storages)
    held: dict[int, int] = {}

    def hold(value: int, until: int) -> None:
        for storage in graph.values[value].storages:
            held[storage] = max(held.get(storage, -1), until)

    roots = set(graph.ops[border].operands)
    for output in graph.outputs:
        if output.kind is OutputKind.MUTATION:
            hold(output.value, border - 1)
        elif output.kind is OutputKind.RESULT:
            # Without `outputs_held` the caller keeps the loss, and the rest only until it has it.
            root = n if output.value in roots else border - 1
            loose = root if loss_inside else border
            hold(output.value, n if protocol.outputs_held else loose)
        else:
            for storage in graph.values[output.value].storages:
                accumulated = delivered.get(storage, n - 1)
                hold(output.value, accumulated if protocol.gradients_resident else n)
    for storage in graph.ops[border].allocates:
        name, role = graph.storages[storage].name, graph.storages[storage].role
        if name == LOSS:
            held[storage] = n
        elif role is Role.TANGENT and (
            (loss_inside and _is_root(graph, storage)) or name == ROOT_GRADIENT
        ):
            held[storage] = n - 1  # `loss.backward()` keeps the gradient it starts from
    return held


def _is_root(graph: Graph, storage: int) -> bool:
    """The tangent of a 0-dimensional output: `loss.backward()` makes and keeps it."""
    size = graph.storages[storage].size
    return bool(size.is_Integer and int(size) <= 16)


def live_ranges(graph: Graph, held: Mapping[int, int]) -> LiveRanges:
    """Live range of every storage.

    Args:
        graph: the joint graph, original or rewritten.
        held: see `holders`.
    """
    n = len(graph.ops)
    birth = [-1] * len(graph.storages)
    death = [n] * len(graph.storages)
    for i, op in enumerate(graph.ops):
        for storage in op.allocates:
            birth[storage], death[storage] = i, max(i, held.get(storage, -1))
    for i, op in enumerate(graph.ops):
        for value in op.operands:
            for storage in graph.values[value].storages:
                death[storage] = max(death[storage], i)
        for storage in graph.values[op.result].storages:
            death[storage] = max(death[storage], i)
    return LiveRanges(tuple(birth), tuple(death))


def _texts(graph: Graph) -> dict[int, str]:
    """Type and shape by storage: of the first value that refers to it alone, else of the first."""
    texts: dict[int, str] = {}
    for alone in (True, False):
        for value in graph.values:
            if (len(value.storages) == 1) is alone:
                for storage in value.storages:
                    texts.setdefault(storage, value.text)
    return texts


def planned_trace(graph: Graph, ranges: LiveRanges) -> Trace:
    """Trace of forward and backward of a planned step.

    Args:
        graph: the rewritten joint graph.
        ranges: its live ranges.
    """
    texts = _texts(graph)
    return Trace(
        tuple(
            Instant(op.name, op.target, op.phase, op.scratch, op.source, op.module)
            for op in graph.ops
        ),
        tuple(
            Block(s.name, s.role, s.size, birth, death, texts.get(i, ""))
            for i, (s, birth, death) in enumerate(
                zip(graph.storages, ranges.birth, ranges.death, strict=True)
            )
        ),
    )
