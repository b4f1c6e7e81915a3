import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import chain, identity, problems, random_problem

from remat.ir import VerifyError
from remat.solvers import FORBIDDEN, Op, Problem, evaluate


def stepwise_bytes(problem: Problem, schedule: Sequence[int]) -> list[int]:
    """Bytes at each execution, by asking of every earlier execution what is still wanted of it."""
    n = len(problem.ops)
    first = [schedule.index(v) for v in range(n)]

    def reads(position: int) -> set[int]:
        op = problem.ops[schedule[position]]
        repeated = position != first[schedule[position]]
        return {*op.reads} | ({op.state} if repeated and op.state is not None else set[int]())

    def writes(position: int) -> set[int]:
        v = schedule[position]
        state = problem.ops[v].state
        kept = state is not None and position == first[v] and schedule.count(v) > 1
        return {*problem.ops[v].writes} | ({state} if kept and state is not None else set[int]())

    def reused(s: int, birth: int, now: int) -> bool:
        """Storage s is overwritten by the execution at `now`, and not just read."""
        op = problem.ops[schedule[now]]
        pair = now == first[schedule[now]] and s in [a for a, _ in op.reuse]
        read = birth == max((b for b in range(now) if s in writes(b)), default=-1)
        return pair and read and not alive(s, birth, now + 1)

    def alive(s: int, birth: int, now: int) -> bool:
        if birth == now:
            return True
        held = problem.held[s]
        if birth == first[schedule[birth]] and (held >= n or (held >= 0 and now <= first[held])):
            return True
        for later in range(birth + 1, len(schedule)):
            if s in reads(later) and later >= now:
                return True
            if s in writes(later):
                return False
        return False

    total: list[int] = []
    for now, v in enumerate(schedule):
        op = problem.ops[v]
        used = problem.resident + op.scratch + (op.repeat_scratch if now != first[v] else 0)
        for birth in range(now + 1):
            there = [
                s for s in writes(birth) if alive(s, birth, now) and not reused(s, birth, now)
            ]
            used += sum(problem.sizes[s] for s in there)
            if now == first[v] and not set(there).isdisjoint(op.absent):
                used += FORBIDDEN
        total.append(used)
    return total


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    problem = draw(problems())
    schedule: list[int] = []
    for v in range(len(problem.ops)):
        schedule.append(v)
        candidates = [u for u in range(v + 1) if problem.ops[u].candidate]
        if candidates:
            schedule += draw(st.lists(st.sampled_from(candidates), max_size=3))
    return problem, tuple(schedule)


@given(scheduled())
def test_equals_a_stepwise_simulation(case: tuple[Problem, tuple[int, ...]]) -> None:
    problem, schedule = case
    found = evaluate(problem, schedule)
    assert list(found.bytes) == stepwise_bytes(problem, schedule)
    assert found.peak == max(found.bytes) == found.bytes[found.peak_at]
    assert found.peak_at == found.bytes.index(found.peak)
    assert found.cost == sum(problem.ops[v].cost for v in schedule) - problem.baseline_cost
    assert found.feasible == (found.peak <= problem.budget)


def test_counts_a_chain_by_hand() -> None:
    # Forward 0, 1, 2 then backward 3 (reads 2), 4 (reads 1, 3), 5 (reads 0, 4).
    assert evaluate(chain(3), identity(chain(3))).bytes == (1, 2, 3, 4, 4, 3)
    # Storage 1 is dropped after op 2 and written again before op 4.
    assert evaluate(chain(3), (0, 1, 2, 3, 1, 4, 5)).bytes == (1, 2, 3, 3, 3, 4, 3)


def test_holds_only_the_first_instance() -> None:
    ops = (Op(1, (), (0,)), Op(1, (0,), (1,)), Op(1, (0,), (2,)))
    problem = Problem(ops, (5, 1, 1), (3, -1, -1), resident=0, budget=0)
    assert evaluate(problem, (0, 1, 2)).bytes == (5, 6, 6)
    assert evaluate(problem, (0, 1, 0, 2)).bytes == (5, 6, 10, 11)


def test_keeps_the_state_only_of_a_repeated_op() -> None:
    ops = (Op(1, (), (0,), state=1, repeat_scratch=2), Op(1, (0,), (2,)), Op(1, (0,), (3,)))
    problem = Problem(ops, (5, 3, 1, 1), (-1,) * 4, resident=10, budget=0)
    assert evaluate(problem, (0, 1, 2)).bytes == (15, 16, 16)
    assert evaluate(problem, (0, 1, 0, 2)).bytes == (18, 19, 20, 16)


def test_a_dying_input_is_overwritten_by_a_first_execution_only() -> None:
    ops = (Op(1, (), (0,)), Op(1, (0,), (1,), reuse=((0, 1),)), Op(1, (1,), (2,)))
    problem = Problem(ops, (5, 5, 1), (-1,) * 3, resident=0, budget=0)
    assert evaluate(problem, (0, 1, 2)).bytes == (5, 5, 6)
    # Read again after op 1, storage 0 is not dying there; a repetition of op 1 takes its own place.
    assert evaluate(problem, (0, 1, 1, 2)).bytes == (5, 10, 10, 6)
    assert evaluate(problem, (0, 1, 0, 1, 2)).bytes == (5, 5, 5, 10, 6)
    assert evaluate(replace(problem, held=(1, -1, -1)), (0, 1, 2)).bytes == (5, 5, 6)
    assert evaluate(replace(problem, held=(2, -1, -1)), (0, 1, 2)).bytes == (5, 10, 11)
    shorter = Problem(ops[:2], (5, 5), (2, -1), resident=0, budget=0)
    assert evaluate(shorter, (0, 1)).bytes == (5, 10)


def test_an_empty_problem_takes_the_resident_bytes() -> None:
    found = evaluate(Problem((), (), (), resident=7, budget=7), ())
    assert (found.peak, found.peak_at, found.feasible) == (7, -1, True)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((0, 2, 1), "execution 1 is of op 2; the problem has ops 0 to 1"),
        ((1, 0), "execution 0 is the first of op 1, before that of op 0"),
        ((0,), "the schedule ends before op 1 of 2 is executed"),
        ((0, 1, 0), "execution 2 repeats op 0, which is not a candidate"),
    ],
)
def test_names_what_is_wrong_with_a_schedule(schedule: tuple[int, ...], message: str) -> None:
    ops = (Op(1, (), (0,), candidate=False), Op(1, (0,), (1,)))
    problem = Problem(ops, (1, 1), (-1, -1), resident=0, budget=9)
    with pytest.raises(VerifyError, match=re.escape(message)):
        evaluate(problem, schedule)


def test_names_a_read_of_what_nobody_wrote() -> None:
    problem = Problem((Op(1, (0,), ()),), (1,), (-1,), resident=0, budget=9)
    message = "execution 0 (op 0) reads storage 0, which was not written before"
    with pytest.raises(VerifyError, match=re.escape(message)):
        evaluate(problem, (0,))


def test_does_not_look_at_the_budget() -> None:
    problem = random_problem(1, 7)
    low = evaluate(replace(problem, budget=0), identity(problem))
    high = evaluate(replace(problem, budget=10**9), identity(problem))
    assert low.bytes == high.bytes
