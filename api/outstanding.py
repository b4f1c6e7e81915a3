"""Several forwards outstanding: what the others hold while one step runs.

Definitions.
    (1) A forward *leaves* what is alive when its backward begins and was not before it: saved
        activations, outputs, what the loss keeps; and its inputs, since each forward has its own batch.
    (2) With n forwards outstanding, n - 1 times what one leaves is on the device throughout the step of
        the last. Gradients are resident: by the time of the second backward the first has made them.

So the step is planned alone under the budget less a reserve, the smallest for which what the others
leave under that plan fits into the reserve. Found by bisection: a plan for less memory usually leaves
less, though not always, so the plan is feasible but may not be the cheapest.

Not handled: forwards of different kinds (other plans, other sizes).
"""

from collections.abc import Callable
from dataclasses import replace

import sympy

from remat.ir import Block, Phase, Role, Trace
from remat.solvers import Solution

OTHERS = "other forwards"
"""Name of the block that stands for what they leave."""
ROUNDS = 6
"""Of the bisection."""


def left_size(trace: Trace) -> sympy.Expr:
    """Bytes that one forward leaves for its backward, its inputs included."""
    return sympy.Add(*_left(trace))


def left_bytes(trace: Trace) -> int:
    """The same, of a trace without symbols."""
    return sum(map(int, _left(trace)))


def _left(trace: Trace) -> list[sympy.Expr]:
    phases = [instant.phase for instant in trace.instants]
    begin = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
    return [
        block.size
        for block in trace.blocks
        if (0 <= block.birth < begin <= block.death) or block.role is Role.INPUT
    ]


def with_others(trace: Trace, others: int) -> Trace:
    """The trace beside so many other forwards, which leave as much as this one."""
    if not others:
        return trace
    own = [block for block in trace.blocks if block.name != OTHERS]
    left = others * left_size(trace)
    block = Block(OTHERS, Role.ACTIVATION, left, -1, len(trace.instants))
    return replace(trace, blocks=(*own, block))


def solve_reserved(
    solve: Callable[[int], Solution],
    left: Callable[[Solution], int],
    least: Solution,
    budget: int,
) -> Solution:
    """The solution with the smallest reserve that holds what the others leave.

    Args:
        solve: solves for one forward under a budget.
        left: what all the others leave under a solution, bytes.
        least: the solution of least peak; fits together with what the others leave under it.
        budget: for all of them, bytes.
    """
    best, low, high = least, 0, budget - least.peak
    for _ in range(ROUNDS):
        reserve = (low + high) // 2
        found = solve(budget - reserve)
        if found.schedule and left(found) <= reserve:
            best, high = found, reserve
        else:
            low = reserve
    return best


def outstanding_text(count: int, planned_for: int) -> str:
    """The warning for more forwards than planned.

    Args:
        count: forwards that are outstanding, with the one that begins.
        planned_for: forwards that the protocol names.
    """
    return (
        f"remat: {count} forwards are outstanding, planned for {planned_for}; each keeps its saved "
        "activations, so the budget may be exceeded. Pass "
        f"protocol=StepProtocol(forwards_outstanding={count})."
    )


def held_text(count: int, size: int) -> str:
    """The warning for outputs that are kept though the protocol says they are dropped.

    Args:
        count: of the outputs.
        size: of all of them, bytes.
    """
    return (
        f"remat: planned for outputs_held=False, but {count} outputs ({size} bytes) are still held when "
        "backward begins, so the budget may be exceeded. Drop them before backward, or plan with "
        "protocol=StepProtocol(outputs_held=True)."
    )
