"""A real model's training step as one joint graph and one problem, which all peers and we are given.

The step is forward and backward; parameters, batch and gradients count, optimizer state does not (it would
add the same bytes everywhere). Outputs but the loss are dropped, as ``model(**batch).loss`` does.

A peer answers with the executions that its program makes, in any order. They are judged by the solvers'
independent evaluator, on the same problem with its ops renumbered to the order in which the peer first
executes them: so no peer is bound to our order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from remat.ir import VerifyError
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
    times: Mapping[str, int]
    """Time of each op by its name, nanoseconds."""

    @property
    def program(self) -> tuple[int, ...]:
        """Every op once."""
        return tuple(range(len(self.problem.ops)))

    def formulated(self, prepared: Prepared) -> tuple[Problem, Index]:
        """The problem of the same step in another order."""
        return _formulate(prepared, self.times)


def capture_step(case: Case, device: str) -> Step:
    """Trace a case for a device and formulate it.

    Raises:
        UnsupportedGraphError: the model cannot be captured.
    """
    module, kwargs = make(case)
    prepared = prepare_step(module, (), kwargs, protocol=PROTOCOL, cuda=device != "cpu")
    times = op_times(prepared, device)
    by_name = {op.name: time for op, time in zip(prepared.graph.ops, times, strict=True)}
    problem, index = _formulate(prepared, by_name)
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
        by_name,
    )


def _formulate(prepared: Prepared, times: Mapping[str, int]) -> tuple[Problem, Index]:
    return formulate(
        prepared.graph,
        [times.get(op.name, 0) for op in prepared.graph.ops],
        PROTOCOL,
        resident=sum(resident_bytes(prepared.graph).values()),
        budget=0,
        state_bytes=state_bytes(str(prepared.device)),
    )


def free(problem: Problem) -> Problem:
    """The problem as peers see it: any op may run again, and nothing is reused in place."""
    ops = tuple(replace(op, candidate=True, reuse=(), absent=()) for op in problem.ops)
    return replace(problem, ops=ops)


def judge(problem: Problem, executions: Sequence[int]) -> Evaluation:
    """Peak and cost of a peer's program, which executes the problem's ops in any order.

    Raises:
        VerifyError: the program reads something before it is written, or leaves an op out.
    """
    order = list(dict.fromkeys(executions))
    if len(order) < len(problem.ops):
        raise VerifyError(f"{len(problem.ops) - len(order)} ops are never executed")
    position = {v: i for i, v in enumerate(order)}
    held = tuple(position.get(until, until) for until in problem.held)
    peers = free(problem)
    ops = tuple(peers.ops[v] for v in order)
    return evaluate(replace(peers, ops=ops, held=held), [position[v] for v in executions])
