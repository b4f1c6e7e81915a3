"""Formulation: a graph, its costs and a budget to a `Problem` of plain integers.

Aliases are contracted: reading a view is reading the storage of its base, and a view costs nothing to
make again. Inputs of the step are resident, and drop out of the problem. A random op gets a storage
for the state of the generator, which only a repetition reads. An op that may overwrite an operand reuses
its storage (see `reuse`).

Backward is delivered to autograd in *stages* (see `cut_stages`); when gradients are accumulated, a
gradient is free after the stage that delivers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from remat import solvers
from remat.ir import BORDER, Graph, OutputKind, Role

from .liveness import holders
from .memory import at_binding
from .patterns import Demands
from .protocol import StepProtocol
from .reuse import reusable

STAGES = 32
"""A stage is cut when this fraction of the bytes of all gradients is pending."""

NOTHING = Demands()
"""The solver chooses freely."""


@dataclass(frozen=True, slots=True)
class Index:
    """How a problem maps to its graph."""

    ops: tuple[int, ...]
    """Graph op of each problem op."""
    storages: tuple[int, ...]
    """Graph storage of each problem storage; -1 for a generator state."""
    stage_ends: tuple[int, ...]
    """Graph ops after which a stage of backward ends, ascending."""
    delivered: Mapping[int, int]
    """Gradient storage -> graph op that ends the stage that delivers it."""


def cut_stages(
    graph: Graph, binding: Mapping[sympy.Symbol, int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Cut backward into stages; a gradient is delivered at the end of the stage of its last use.

    That of its parameter counts too: a hook may step the parameter as soon as it has its gradient.

    Returns:
        The ops that end a stage, and for each gradient storage the op that ends its stage.
    """
    ready: dict[int, int] = {}
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            ready |= dict.fromkeys(graph.values[output.value].storages, 0)
    inputs = {s for value in graph.inputs for s in graph.values[value].storages}
    ready = {s: i for s, i in ready.items() if s not in inputs}
    first = next(
        i for i in range(graph.border + 1, len(graph.ops)) if not graph.is_alias(graph.ops[i])
    )
    real = [i for i, op in enumerate(graph.ops) if not graph.is_alias(op)]
    for i in real:
        op = graph.ops[i]
        for value in (*op.operands, op.result):
            at = max(i, first)
            ready |= {s: at for s in graph.values[value].storages if s in ready}
    last_read = {
        s: i
        for i in real
        if i > graph.border
        for value in graph.ops[i].operands
        for s in graph.values[value].storages
        if s in inputs
    }
    parameters = {graph.values[value].name: value for value in graph.inputs}
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT and output.target in parameters:
            read = graph.values[parameters[output.target]].storages
            end = max((last_read[s] for s in read if s in last_read), default=0)
            ready |= {
                s: max(ready[s], end) for s in graph.values[output.value].storages if s in ready
            }
    size = {s: at_binding(graph.storages[s].size, binding) for s in ready}
    ends: list[int] = []
    pending = 0
    for storage in sorted(ready, key=lambda s: (ready[s], s)):
        pending += size[storage]
        if pending * STAGES >= sum(size.values()) and ends[-1:] != [ready[storage]]:
            ends.append(ready[storage])
            pending = 0
    if ends[-1:] != [real[-1]]:
        ends.append(real[-1])
    delivered = {s: next(end for end in ends if end >= i) for s, i in ready.items()}
    return tuple(ends), delivered


def formulate(
    graph: Graph,
    costs: Sequence[int],
    protocol: StepProtocol,
    *,
    resident: int,
    budget: int,
    state_bytes: int,
    binding: Mapping[sympy.Symbol, int] | None = None,
    demanded: Demands = NOTHING,
) -> tuple[solvers.Problem, Index]:
    """Make the integer problem of a graph.

    Args:
        graph: the canonical joint graph.
        costs: time of each graph op, nanoseconds.
        protocol: what the caller keeps.
        resident: bytes on the device throughout.
        budget: cap on the peak, bytes.
        state_bytes: size of a generator state on the device.
        binding: the integer of every symbol.
        demanded: what must be saved, and what must not be.
    """
    binding = binding or {}
    ends, delivered = cut_stages(graph, binding)
    inputs = {s for value in graph.inputs for s in graph.values[value].storages}
    kept = [i for i, op in enumerate(graph.ops) if not graph.is_alias(op)]
    storages = [s for s in range(len(graph.storages)) if s not in inputs]
    number = {s: i for i, s in enumerate(storages)}
    sizes = [at_binding(graph.storages[s].size, binding) for s in storages]
    position = _next_kept(kept, len(graph.ops))
    held = [-1] * len(storages)
    for storage, until in holders(graph, protocol, delivered).items():
        if storage in number:
            held[number[storage]] = position[until]
    absent = tuple(sorted(number[s] for s in demanded.absent if sizes[number[s]]))
    reuse = {i: ((number[a], number[b]),) for i, (_, a, b) in reusable(graph).items()}
    ops: list[solvers.Op] = []
    origin = list(storages)
    for i in kept:
        op = graph.ops[i]
        reads = {number[s] for v in op.operands for s in graph.values[v].storages if s in number}
        state = None
        if op.random and not op.pinned:
            state = len(sizes)
            sizes.append(state_bytes)
            held.append(-1)
            origin.append(-1)
        ops.append(
            solvers.Op(
                cost=costs[i],
                reads=tuple(sorted(reads)),
                writes=tuple(sorted(number[s] for s in op.allocates)),
                scratch=at_binding(op.scratch, binding),
                candidate=not op.pinned and i not in demanded.saved,
                state=state,
                repeat_scratch=state_bytes if state is not None else 0,
                absent=absent if op.target == BORDER else (),
                reuse=reuse.get(i, ()),
            )
        )
    problem = solvers.Problem(tuple(ops), tuple(sizes), tuple(held), resident, budget)
    return problem, Index(tuple(kept), tuple(origin), ends, delivered)


def _next_kept(kept: Sequence[int], n: int) -> list[int]:
    """Per graph op, and for n: the last problem op at or before it; `len(kept)` for n."""
    position = [0] * (n + 1)
    current = 0
    for problem_op, graph_op in enumerate(kept):
        position[graph_op] = problem_op
    marks = dict(zip(kept, range(len(kept)), strict=True))
    for i in range(n):
        current = marks.get(i, current)
        position[i] = current
    position[n] = len(kept)
    return position


def resident_bytes(
    graph: Graph, binding: Mapping[sympy.Symbol, int] | None = None
) -> dict[Role, int]:
    """Bytes of the step's inputs, by role; a storage with two names counts once."""
    found: dict[Role, int] = {}
    seen = dict.fromkeys(s for value in graph.inputs for s in graph.values[value].storages)
    for storage in seen:
        role = graph.storages[storage].role
        found[role] = found.get(role, 0) + at_binding(graph.storages[storage].size, binding or {})
    return found
