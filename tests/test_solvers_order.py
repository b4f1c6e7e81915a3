"""Order against every order there is, on small problems; its rules on larger ones."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, identity, problems

from remat.solvers import Op, Problem, evaluate, order, permuted

Pairs = list[tuple[int, int]]


def dependencies(problem: Problem) -> Pairs:
    """Pairs of ops that must keep their order: for data, and for what is held until an op."""
    ops = problem.ops
    writer = {s: v for v, op in enumerate(ops) for s in op.writes}
    pairs = [(writer[s], v) for v, op in enumerate(ops) for s in op.reads if s in writer]
    held = [(writer[s], h) for s, h in enumerate(problem.held) if s in writer and h < len(ops)]
    return [(a, b) for a, b in pairs + held if a < b]


def legal_orders(problem: Problem, pairs: Pairs, barrier: int) -> Iterator[tuple[int, ...]]:
    n = len(problem.ops)
    pairs = [*pairs, *((v, barrier) for v in range(barrier))]
    pairs += [(barrier, v) for v in range(barrier + 1, n)]
    before = [{a for a, b in pairs if b == v} for v in range(n)]

    def extend(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == n:
            yield done
        for v in range(n):
            if v not in done and before[v] <= {*done}:
                yield from extend((*done, v))

    return extend(())


def peak(problem: Problem) -> int:
    return evaluate(problem, identity(problem)).peak


@st.composite
def rules(draw: st.DrawFn, most_ops: int) -> tuple[Problem, int, Pairs]:
    """A problem, a barrier, and ops that must keep their order."""
    problem = draw(problems(most_ops))
    problem = replace(problem, ops=tuple(replace(op, absent=()) for op in problem.ops))
    n = len(problem.ops)
    fixed = sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))
    return problem, draw(st.integers(0, n - 1)), list(pairwise(fixed))


@settings(deadline=None, max_examples=150)
@given(rules(7))
def test_no_order_of_a_small_problem_has_a_smaller_peak(case: tuple[Problem, int, Pairs]) -> None:
    problem, barrier, pairs = case
    found = order(problem, barriers=(barrier,), before=pairs)
    legal = list(legal_orders(problem, dependencies(problem) + pairs, barrier))
    assert found in legal
    assert peak(permuted(problem, found)) == min(peak(permuted(problem, o)) for o in legal)


@settings(deadline=None, max_examples=50)
@given(rules(60))
def test_an_order_keeps_its_rules_and_never_raises_the_peak(
    case: tuple[Problem, int, Pairs],
) -> None:
    problem, barrier, pairs = case
    found = order(problem, barriers=(barrier,), before=pairs)
    at = {v: i for i, v in enumerate(found)}
    assert sorted(found) == list(identity(problem))
    assert all(at[a] < at[b] for a, b in dependencies(problem) + pairs)
    assert all((at[v] < barrier, at[v] > barrier) == (v < barrier, v > barrier) for v in found)
    assert peak(permuted(problem, found)) <= peak(problem)
    assert order(problem, barriers=(barrier,), before=pairs) == found


def test_the_weight_gradient_comes_first_where_it_frees_more() -> None:
    # Op 2 is the gradient of an input (3 new bytes), op 3 that of a weight: it frees 8 bytes for 1.
    ops = (
        Op(1, (), (0,)),
        Op(1, (), (1,)),
        Op(1, (1,), (2,)),
        Op(1, (0, 1), (3,)),
        Op(1, (2,), ()),
    )
    problem = Problem(ops, (8, 2, 3, 1), (-1, -1, -1, 5), resident=0, budget=0)
    found = order(problem, barriers=(1,))
    assert found == (0, 1, 3, 2, 4)
    assert (peak(problem), peak(permuted(problem, found))) == (14, 11)


def test_a_program_without_choice_stays_as_it_is() -> None:
    assert order(chain(30)) == identity(chain(30))
