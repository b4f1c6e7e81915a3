"""In-place reuse: which op may write its result over which operand, and which does in a schedule.

Conditions, beyond those of the kernel (`ir.in_place`). Op v may write its result b over storage a if
    (1) v reads a through one value, allocates b alone, and the two have the same size;
    (2) a is allocated by an op of torch itself on the same side of the border as v: not by the border, and
        no input; so it is new in every run of that side, also of a backward that is run twice. A custom
        op may return a tensor that it keeps;
    (3) no output refers to a: no result, no update, no gradient, which autograd may keep and hooks may see;
    (4) v draws no random numbers.
Of several such operands the one that is last read the earliest is taken: it is the likeliest to die at v.
In a schedule v reuses a if a dies there (`solvers.problem`, rule 5). Views need no further condition: whoever
reads one reads a.

Not handled: a repetition that reuses; a storage of another size or type; several results.
"""

from collections.abc import Iterable, Sequence

from remat.ir import Graph

OF_TORCH = ("aten", "prims")
"""Namespaces of ops that allocate what they return."""


def reusable(graph: Graph) -> dict[int, tuple[int, int, int]]:
    """Op -> value that it may overwrite, the storage of that value, and the storage of its own result."""
    border = graph.border
    seen = (*graph.inputs, *(output.value for output in graph.outputs))
    writer = {
        s: i
        for i, op in enumerate(graph.ops)
        if op.target.partition(".")[0] in OF_TORCH
        for s in op.allocates
    }
    for storage in (s for value in seen for s in graph.values[value].storages):
        writer.pop(storage, None)
    last = {s: i for i, op in enumerate(graph.ops) for s in _reads(graph, op.operands)}
    found: dict[int, tuple[int, int, int]] = {}
    for i, op in enumerate(graph.ops):
        if len(op.allocates) != 1 or op.random:
            continue
        (b,) = op.allocates
        reads = _reads(graph, op.operands)
        choices: list[tuple[int, int, int]] = []
        for value in op.overwritable:
            (a,) = graph.values[value].storages
            known = a in writer and (writer[a] < border) == (i < border)
            if known and reads.count(a) == 1 and graph.storages[a].size == graph.storages[b].size:
                choices.append((last[a], value, a))
        if choices:
            _, value, a = min(choices)
            found[i] = (value, a, b)
    return found


def reused(graph: Graph, schedule: Sequence[int]) -> dict[int, int]:
    """Op -> value that its first execution overwrites.

    Args:
        graph: the joint graph.
        schedule: its ops in order of execution, without aliases.
    """
    pairs = reusable(graph)
    first = {op: position for position, op in reversed(list(enumerate(schedule)))}
    found: dict[int, int] = {}
    wanted: set[int] = set()
    """Storages that are read later than the present position, before they are written again."""
    for position in reversed(range(len(schedule))):
        i = schedule[position]
        op = graph.ops[i]
        if i in pairs and first[i] == position and pairs[i][1] not in wanted:
            found[i] = pairs[i][0]
        wanted.difference_update(op.allocates)
        wanted.update(_reads(graph, op.operands))
    return found


def _reads(graph: Graph, operands: Iterable[int]) -> list[int]:
    return [s for value in operands for s in graph.values[value].storages]
