"""Nested recomputation along a chain, and improvement between two instants: always feasible, never dearer."""

import random
import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, identity, problems

from remat.solvers import Op, Problem, evaluate, solve_greedy
from remat.solvers.chain import chain_schedules, find_chain
from remat.solvers.index import index
from remat.solvers.span import improve_span


def training_program(rng: random.Random, blocks: int) -> Problem:
    """Blocks of a few ops around a residual stream, a mask that all read, a loss, and their backward."""
    ops: list[Op] = [Op(1, (), (0,))]  # the mask
    forward: list[list[int]] = []
    stream = 0
    for _ in range(blocks):
        inner: list[int] = []
        for _ in range(rng.randint(1, 4)):
            reads = {stream, *inner[-1:], *([0] if rng.random() < 0.3 else [])}
            inner.append(len(ops))
            ops.append(Op(rng.randint(1, 9), tuple(sorted(reads)), (len(ops),)))
        forward.append([stream, *inner])
        stream = inner[-1]
    gradient = len(ops)
    ops.append(Op(1, (stream,), (gradient,)))
    for inner in reversed(forward):
        for s in reversed(inner):
            ops.append(Op(rng.randint(1, 9), tuple(sorted({s, gradient})), (len(ops),)))
            gradient = len(ops) - 1
    sizes = tuple(rng.randint(1, 20) for _ in ops)
    problem = Problem(tuple(ops), sizes, (-1,) * len(ops), resident=rng.randint(0, 5), budget=0)
    peak = evaluate(problem, identity(problem)).peak
    return replace(problem, budget=rng.randint(peak // 4, peak))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 20))
def test_every_schedule_of_a_chain_fits_and_is_cheaper_than_the_last(
    seed: int, blocks: int
) -> None:
    problem = training_program(random.Random(seed), blocks)
    table = index(problem)
    costs = []
    for schedule in chain_schedules(problem, table, time.monotonic() + 60):
        found = evaluate(problem, schedule)
        assert found.feasible
        costs.append(found.cost)
    assert costs == sorted(set(costs), reverse=True)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 20))
def test_blocks_cover_forward_and_backward_once(seed: int, blocks: int) -> None:
    problem = training_program(random.Random(seed), blocks)
    found = find_chain(problem, index(problem))
    if found is None:
        return
    forward = [v for block in found.blocks for v in range(*block.forward)]
    backward = [v for block in reversed(found.blocks) for v in range(*block.backward)]
    assert [*forward, *backward] == list(range(len(problem.ops)))


def test_a_long_chain_is_recomputed_in_nested_fashion() -> None:
    # Griewank & Walther's optimum for 60 ops and 8 bytes is 85 repetitions; without nesting, checkpoints
    # every so many ops and each piece from its own, it takes 7 pieces of up to 9 ops: all but 7, and
    # the pieces' own activations do not fit beside the checkpoints.
    problem = replace(chain(60), budget=8)
    costs = [
        evaluate(problem, schedule).cost
        for schedule in chain_schedules(problem, index(problem), time.monotonic() + 60)
    ]
    assert 85 <= costs[-1] <= 100


@settings(deadline=None, max_examples=60)
@given(problem=problems(10), data=st.data())
def test_a_span_is_left_feasible_and_cheaper(problem: Problem, data: st.DataObject) -> None:
    start = solve_greedy(problem).schedule
    if not start or len(problem.ops) < 3:
        return
    a = data.draw(st.integers(0, len(problem.ops) - 3))
    b = data.draw(st.integers(a + 2, len(problem.ops) - 1))
    better = improve_span(problem, index(problem), start, a, b, time.monotonic() + 60)
    if better:
        found = evaluate(problem, better)
        assert found.feasible
        assert found.cost < evaluate(problem, start).cost


def test_a_span_gives_up_repetitions_that_the_budget_no_longer_asks_for() -> None:
    tight = replace(chain(8), budget=5)
    start = solve_greedy(tight).schedule
    loose = replace(tight, budget=9)
    assert evaluate(loose, start).cost > 0
    better = improve_span(loose, index(loose), start, 0, 15, time.monotonic() + 60)
    assert evaluate(loose, better).cost == 0
