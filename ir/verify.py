"""The verifier: what holds for every graph.

(1) Names of values are unique, and so are those of ops.
(2) An op reads inputs, results of earlier ops and, after the border, tangents.
(3) There is one border; no backward op stands before it and no forward op after it.
(4) Every storage is an input's or is allocated by exactly one op.
(5) What a result refers to was allocated by its op or is referred to by one of its operands.
(6) Sizes and scratch that are numbers are not negative.
(7) Outputs are inputs or results.
(8) What an op overwrites is no input's, and its result refers to it; what referred to it before is neither
    read afterwards nor an output.
"""

from collections import Counter

from .errors import VerifyError
from .graph import BORDER, Graph
from .text import around
from .trace import Phase


def verify(graph: Graph) -> None:
    """Check a graph.

    Raises:
        VerifyError: an invariant does not hold; shows the ops around the one that breaks it.
    """
    _check_names(graph)
    _check_border(graph)
    _check_ops(graph)
    _check_storages(graph)
    _check_overwriting(graph)


def _fail(graph: Graph, op: int, reason: str) -> VerifyError:
    return VerifyError(f"{graph.ops[op].name}: {reason}\n{around(graph, op)}")


def _check_names(graph: Graph) -> None:
    for kind, names in (
        ("value", [value.name for value in graph.values]),
        ("op", [op.name for op in graph.ops]),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise VerifyError(f"(1) more than one {kind} is called {twice[0]!r}")


def _check_border(graph: Graph) -> None:
    borders = [i for i, op in enumerate(graph.ops) if op.target == BORDER]
    if len(borders) != 1:
        raise VerifyError(f"(3) there are {len(borders)} border ops, not one")
    for i, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD and i < borders[0]:
            raise _fail(graph, i, "(3) a backward op before the border")
        if op.phase is not Phase.BACKWARD and i > borders[0]:
            raise _fail(graph, i, "(3) a forward op after the border")


def _check_ops(graph: Graph) -> None:
    """(2), (5) and (7)."""
    known = dict.fromkeys(graph.inputs)
    for i, op in enumerate(graph.ops):
        for operand in op.operands:
            if operand not in known:
                raise _fail(
                    graph, i, f"(2) reads {graph.values[operand].name!r}, not yet computed"
                )
        sources = {s for value in op.operands for s in graph.values[value].storages}
        strange = [
            graph.storages[s].name
            for s in graph.values[op.result].storages
            if s not in op.allocates and s not in sources
        ]
        if strange:
            raise _fail(graph, i, f"(5) refers to {strange[0]!r}, which none of its operands does")
        known[op.result] = None
        if op.target == BORDER:
            tangents = set(op.allocates)
            for v, value in enumerate(graph.values):
                if value.storages and tangents.issuperset(value.storages):
                    known[v] = None
    for output in graph.outputs:
        if output.value not in known:
            raise VerifyError(f"(7) output {output.target!r} is not computed")


def _check_storages(graph: Graph) -> None:
    """(4) and (6)."""
    origins = Counter(
        s for value in dict.fromkeys(graph.inputs) for s in graph.values[value].storages
    )
    inputs = set(origins)
    for i, op in enumerate(graph.ops):
        for storage in op.allocates:
            origins[storage] += 1
            if origins[storage] > 1 or storage in inputs:
                name = graph.storages[storage].name
                raise _fail(graph, i, f"(4) allocates {name!r}, which exists already")
        if op.scratch.is_negative:
            raise _fail(graph, i, f"(6) scratch of {op.scratch} bytes")
    for s, storage_ in enumerate(graph.storages):
        if storage_.size.is_negative:
            raise VerifyError(f"(6) {storage_.name!r} has {storage_.size} bytes")
        if s not in origins:
            raise VerifyError(f"(4) nothing allocates {storage_.name!r}")


def _check_overwriting(graph: Graph) -> None:
    """(8)."""
    inputs = {s for value in graph.inputs for s in graph.values[value].storages}
    stale: dict[int, int] = {}
    """Value -> op that has overwritten it."""
    made: dict[int, list[int]] = {}
    """Storage -> values that refer to what is in it now."""
    for i, op in enumerate(graph.ops):
        for value in op.operands:
            if value in stale:
                by = graph.ops[stale[value]].name
                raise _fail(
                    graph, i, f"(8) reads {graph.values[value].name!r}, overwritten by {by}"
                )
        for storage in op.overwrites:
            if storage in inputs or storage not in graph.values[op.result].storages:
                raise _fail(graph, i, f"(8) overwrites {graph.storages[storage].name!r}")
            stale |= dict.fromkeys(made.pop(storage, ()), i)
        for storage in graph.values[op.result].storages:
            made.setdefault(storage, []).append(op.result)
    for output in graph.outputs:
        if output.value in stale:
            raise VerifyError(f"(8) output {output.target!r} is overwritten")
