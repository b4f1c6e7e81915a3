"""Reordering: a captured step with its ops in another order, everything else as it was.

The order is the solver's (`solvers/order.py`), within what must stay:
    (1) An op runs after the ops that compute its operands, views and integers included.
    (2) Random ops, and custom ones, which may do anything, keep their order among each other, so the step
        draws the numbers that eager draws.
    (3) Forward stays before the border, backward after it. Updates of buffers are outputs of the graph and
        are copied into place between the two, whatever the order.
Every op computes the same from the same, so results are the same bits. Stages of backward are cut anew in the
new order (`formulate.cut_stages`), and a gradient is still delivered after its last use, and its parameter's.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx
from torch._ops import OpOverload

from remat import solvers
from remat.ir import VerifyError
from remat.ir.canonical import is_random

from .formulate import Index
from .prepare import Prepared
from .rewrite import rewrite_joint


def find_order(prepared: Prepared, problem: solvers.Problem, index: Index) -> tuple[int, ...]:
    """The problem's ops in the order in which they take the least memory with nothing repeated.

    Args:
        prepared: the step.
        problem: of its graph.
        index: from `formulate`, with the problem.
    """
    border = index.ops.index(prepared.graph.border)
    return solvers.order(problem, barriers=(border,), before=must_precede(prepared, index))


def must_precede(prepared: Prepared, index: Index) -> list[tuple[int, int]]:
    """Pairs of problem ops on one side of the border that keep their order, by (1) and (2).

    Args:
        prepared: the step.
        index: from `formulate`.
    """
    graph = prepared.graph
    number = {op: i for i, op in enumerate(index.ops)}
    nodes = {node.name: node for node in prepared.capture.joint.graph.nodes}
    behind: dict[int, tuple[int, ...]] = {}
    """Value -> problem ops that it comes from, through aliases."""
    pairs: list[tuple[int, int]] = []
    in_line: list[int] = []
    for i, op in enumerate(graph.ops):
        sources = tuple(dict.fromkeys(s for value in op.operands for s in behind.get(value, ())))
        behind[op.result] = sources
        if i in number:
            pairs += [(source, number[i]) for source in sources]
            behind[op.result] = (number[i],)
            if op.name in nodes and _stays_in_line(nodes[op.name]):
                in_line.append(number[i])
    return [*pairs, *pairwise(in_line)]


def _stays_in_line(node: fx.Node) -> bool:
    """It draws random numbers, or may do anything beside yielding its result."""
    target = node.target
    custom = isinstance(target, OpOverload) and target.namespace not in ("aten", "prims")
    return custom or is_random(node) or node.is_impure()


def reorder_step(prepared: Prepared, index: Index, permutation: Sequence[int]) -> Prepared:
    """The step with its ops in another order.

    Args:
        prepared: the step; not changed.
        index: from `formulate`.
        permutation: problem ops in the new order, from `find_order`.

    Raises:
        VerifyError: a name got lost, which would be a defect.
    """
    joint = prepared.capture.joint
    made = rewrite_joint(joint, prepared.graph, index, permutation)
    graph = prepared.lift(made.joint, made.border, prepared.measured)
    names = {op.name for op in graph.ops}
    if lost := [
        prepared.graph.ops[op].name for op in index.ops if prepared.graph.ops[op].name not in names
    ]:
        raise VerifyError(f"reordering lost {', '.join(lost)}")
    capture = replace(prepared.capture, joint=made.joint)
    return replace(prepared, capture=capture, border=made.border, graph=graph)
