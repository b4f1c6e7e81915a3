"""The bound for any order, against exhaustive search over all orders."""

from dataclasses import replace
from itertools import permutations

import pytest
from graphs import FCN8, GPT, graph
from hypothesis import given, settings
from problems import chain, problems, random_problem

from remat.ir import SolverError
from remat.solvers import (
    Limits,
    Op,
    Problem,
    any_order_bound,
    any_order_optimum,
    permuted,
    solve_brute_force,
    solve_greedy,
)


def orders(problem: Problem) -> list[tuple[int, ...]]:
    """Every order in which readers, and ops until which a storage is held, follow its writer."""
    ops, n = problem.ops, len(problem.ops)
    writer = {s: v for v, op in enumerate(ops) for s in op.writes}
    pairs = [(writer[s], v) for v, op in enumerate(ops) for s in op.reads]
    pairs += [(writer[s], h) for s, h in enumerate(problem.held) if s in writer and h < n]
    pairs = [(u, v) for u, v in pairs if u < v]
    every = permutations(range(n))
    return [x for x in every if all(x.index(u) < x.index(v) for u, v in pairs)]


@settings(deadline=None, max_examples=60)
@given(problems(5))
def test_the_optimum_of_any_order_is_the_least_of_every_order(problem: Problem) -> None:
    each = [solve_brute_force(permuted(problem, x)).bound for x in orders(problem)]
    assert any_order_optimum(problem) == min(each)


@settings(deadline=None, max_examples=150)
@given(problems(6))
def test_the_bound_holds_in_any_order(problem: Problem) -> None:
    optimum = any_order_optimum(problem)
    assert any_order_bound(problem) <= optimum + 1e-6
    assert optimum <= solve_brute_force(problem).bound


def test_another_order_is_often_cheaper_and_the_bound_is_often_reached() -> None:
    # If these fractions change, so did the class of programs or the strength of the model.
    cheaper = costly = reached = 0
    for seed in range(150):
        problem = random_problem(seed, 6)
        given_order, optimum = solve_brute_force(problem).bound, any_order_optimum(problem)
        cheaper += optimum < given_order
        costly += optimum > 0
        reached += optimum > 0 and any_order_bound(problem) >= optimum * (1 - 1e-6)
    assert cheaper >= 8
    assert reached >= costly / 2


def test_a_chain_has_one_order_and_its_bound() -> None:
    for budget in (5, 4, 3):
        problem = replace(chain(5), budget=budget)
        assert 0 < any_order_bound(problem) <= solve_brute_force(problem).cost


def test_what_may_run_later_is_not_counted() -> None:
    # Op 1 writes 8 that only op 3 reads; after op 2 it costs nothing, in the given order a repetition.
    ops = (Op(1, (), (0,)), Op(2, (), (1,)), Op(1, (0,), (2,)), Op(1, (1, 2), (3,)))
    problem = Problem(ops, (3, 8, 4, 0), (-1,) * 4, resident=0, budget=12)
    assert solve_brute_force(problem).cost == 2
    assert any_order_optimum(problem) == any_order_bound(problem) == 0


def test_no_order_fits_a_budget_below_one_op() -> None:
    assert any_order_bound(replace(chain(4), budget=2)) == float("inf")
    assert any_order_optimum(replace(chain(4), budget=2)) == float("inf")


def test_the_search_over_orders_refuses_large_problems() -> None:
    with pytest.raises(SolverError, match="brute force takes at most"):
        any_order_optimum(chain(20))


@pytest.mark.parametrize(("name", "fraction", "percent"), [(FCN8, 0.8, 0.136), (GPT, 0.3, 17.34)])
def test_another_order_gains_little_on_training_graphs(
    name: str, fraction: float, percent: float
) -> None:
    problem = graph(name, fraction)
    bound = any_order_bound(problem, Limits(gap=1e-4))
    assert 100 * bound / problem.baseline_cost == pytest.approx(percent, abs=0.02)
    assert bound <= solve_greedy(problem).cost * (1 + 1e-6)


def test_the_bound_is_zero_where_the_program_fits() -> None:
    problem = replace(chain(6), budget=100)
    assert any_order_bound(problem) == 0
