"""A real model's training step as one joint graph and one problem, which all peers and we are given.

The step is forward and backward; parameters, batch and gradients count, optimizer state does not (it would
add the same bytes everywhere). Outputs but the loss are dropped, as ``model(**batch).loss`` does.

A peer answers with the executions that its program makes, in any order. They are judged by the solvers'
independent evaluator, on the same problem with its ops renumbered to the order in which the peer first
executes them: so no peer is bound to our order.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.passes import (
    Index,
    Prepared,
    StepProtocol,
    formulate,
    prepare_step,
    resident_bytes,
    state_bytes,
)
from remat.planner import op_times
from remat.solvers import Evaluation, Problem, evaluate

from .real_models import Case, make

PROTOCOL = StepProtocol(outputs_held=False)


@dataclass(frozen=True)
class Step:
    """One joint graph, and the problem made of it."""

    case: Case
    prepared: Prepared
    index: Index
    problem: Problem
    """Its budget is 0."""
    border: int
    """Problem op between forward and backward."""
    blocks: tuple[tuple[int, ...], ...]
    """Problem ops of the forward of each repeated block, in order."""
    backwards: tuple[tuple[int, ...], ...]
    """Problem ops of the backward of each."""
    names: tuple[str, ...]
    """Name of the graph's node of each problem op."""

    @property
    def program(self) -> tuple[int, ...]:
        """Every op once."""
        return tuple(range(len(self.problem.ops)))


def capture_step(case: Case, device: str) -> Step:
    """Trace a case for a device and formulate it.

    Raises:
        UnsupportedGraphError: the model cannot be captured.
    """
    module, kwargs = make(case)
    prepared = prepare_step(module, (), kwargs, protocol=PROTOCOL, cuda=device != "cpu")
    problem, index = formulate(
        prepared.graph,
        op_times(prepared, device),
        PROTOCOL,
        resident=sum(resident_bytes(prepared.graph).values()),
        budget=0,
        state_bytes=state_bytes("cpu" if device == "cpu" else "cuda"),
    )
    ops = [prepared.graph.ops[op] for op in index.ops]
    border = index.ops.index(prepared.graph.border)
    blocks: dict[str, tuple[list[int], list[int]]] = {}
    for v, op in enumerate(ops):
        found = re.search(case.blocks, op.module)
        if found:
            blocks.setdefault(found.group(), ([], []))[v > border].append(v)
    return Step(
        case,
        prepared,
        index,
        problem,
        border,
        tuple(tuple(forward) for forward, _ in blocks.values()),
        tuple(tuple(backward) for _, backward in blocks.values()),
        tuple(op.name for op in ops),
    )


def judge(problem: Problem, executions: Sequence[int]) -> Evaluation:
    """Peak and cost of a program that executes the problem's ops in any order of first executions.

    Raises:
        VerifyError: the program reads something before it is written, or leaves an op out.
    """
    order = list(dict.fromkeys(executions))
    if len(order) < len(problem.ops):
        return evaluate(problem, executions)  # raises
    position = {v: i for i, v in enumerate(order)}
    held = tuple(position.get(until, until) for until in problem.held)
    renumbered = replace(problem, ops=tuple(problem.ops[v] for v in order), held=held)
    return evaluate(renumbered, [position[v] for v in executions])
