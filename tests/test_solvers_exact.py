"""Every solver against the brute-force oracle, on small problems."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, identity, problems

from remat.ir import SolverError
from remat.solvers import (
    BoundClass,
    Limits,
    Op,
    Problem,
    Solution,
    Status,
    evaluate,
    least_peak,
    solve_brute_force,
    solve_cp_sat,
    solve_greedy,
    solve_windows,
    staged_optimum,
)

Solver = Callable[[Problem], Solution]
SOLVERS: list[Solver] = [solve_windows, solve_cp_sat]


def check(problem: Problem, found: Solution) -> None:
    """What every solution must satisfy, whoever found it."""
    assert found.bound_class in (problem.bound_class, BoundClass.STAGED)
    if found.status in (Status.INFEASIBLE, Status.UNKNOWN):
        assert found.schedule == ()
        return
    measured = evaluate(problem, found.schedule)
    assert measured.feasible
    assert (measured.peak, measured.cost) == (found.peak, found.cost)
    assert 0 <= found.bound <= found.cost


@pytest.mark.parametrize("solve", [*SOLVERS, solve_greedy])
@settings(deadline=None, max_examples=150)
@given(problem=problems())
def test_agrees_with_brute_force(solve: Solver, problem: Problem) -> None:
    exact, found = solve_brute_force(problem), solve(problem)
    check(problem, exact)
    check(problem, found)
    if exact.status is Status.INFEASIBLE:
        assert found.status in (Status.INFEASIBLE, Status.UNKNOWN)
        return
    assert found.status is not Status.INFEASIBLE
    assert found.cost >= exact.cost or not found.schedule
    best = exact.cost
    if found.bound_class is BoundClass.STAGED:
        best = int(staged_optimum(problem))
    assert found.bound <= best + 1e-6
    if found.status is Status.OPTIMAL:
        assert found.cost == best


@settings(deadline=None, max_examples=100)
@given(problem=problems())
def test_the_least_peak_is_valid_and_never_above_the_program(problem: Problem) -> None:
    least = least_peak(problem)
    check(replace(problem, budget=least.peak), least)
    assert least.peak <= evaluate(problem, identity(problem)).peak
    again = solve_windows(replace(problem, budget=least.peak), start=least.schedule)
    assert again.schedule
    assert again.cost <= least.cost


@pytest.mark.parametrize("solve", SOLVERS)
@settings(deadline=None, max_examples=50)
@given(problem=problems(), more=st.integers(0, 9))
def test_cost_does_not_grow_with_the_budget(solve: Solver, problem: Problem, more: int) -> None:
    tight, loose = solve(problem), solve(replace(problem, budget=problem.budget + more))
    if tight.schedule and loose.status is Status.OPTIMAL:
        assert loose.cost <= tight.cost
    assert loose.status is not Status.INFEASIBLE or tight.status is not Status.OPTIMAL


@pytest.mark.parametrize("solve", [*SOLVERS, solve_greedy, least_peak])
@settings(deadline=None, max_examples=25)
@given(problem=problems(10))
def test_answers_the_same_twice(solve: Solver, problem: Problem) -> None:
    assert solve(problem) == solve(problem)


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
@pytest.mark.parametrize(("budget", "cost"), [(6, 0), (5, 1), (4, 2), (3, None), (2, None)])
def test_a_chain_has_its_known_optimum(solve: Solver, budget: int, cost: int | None) -> None:
    # Peak 6 as it is, at the loss; each byte less makes one more forward output absent there.
    problem = replace(chain(5), budget=budget)
    exact = solve_brute_force(problem)
    found = solve(problem)
    check(problem, found)
    if cost is not None:
        assert exact.cost == cost
        assert (found.status, found.cost, found.bound) == (Status.OPTIMAL, cost, cost)
    elif found.schedule:
        assert found.cost == exact.cost


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
def test_a_program_that_fits_is_left_as_it_is(solve: Solver) -> None:
    problem = replace(chain(4), budget=5)
    assert solve(problem) == Solution(Status.OPTIMAL, identity(problem), 0, 5, 0.0)


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
def test_a_budget_below_one_op_is_proven_infeasible(solve: Solver) -> None:
    found = solve(replace(chain(4), budget=2))
    assert (found.status, found.bound) == (Status.INFEASIBLE, float("inf"))


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
def test_keeps_the_state_where_a_random_op_is_repeated(solve: Solver) -> None:
    # Dropping the mask (8) for its state (2) during op 1 is the only way to fit.
    ops = (Op(3, (), (0,), state=1), Op(1, (), (2,)), Op(1, (0,), (3,)))
    problem = Problem(ops, (8, 2, 5, 1), (-1,) * 4, resident=0, budget=11)
    found = solve(problem)
    assert (found.schedule, found.cost, found.peak) == ((0, 1, 0, 2), 3, 10)
    assert solve(replace(problem, budget=9)).status is Status.INFEASIBLE


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
def test_never_repeats_what_is_not_a_candidate(solve: Solver) -> None:
    ops = (Op(0, (), (0,), candidate=False), Op(1, (), (1,)), Op(1, (0,), (2,)))
    problem = Problem(ops, (8, 5, 1), (-1,) * 3, resident=0, budget=12)
    assert solve(problem).status is Status.INFEASIBLE


@pytest.mark.parametrize("solve", [*SOLVERS, solve_brute_force])
def test_costless_ops_are_not_repeated_in_vain(solve: Solver) -> None:
    ops = tuple(replace(op, cost=0) for op in chain(5).ops)
    found = solve(replace(chain(5), ops=ops, budget=5))
    assert (found.status, found.cost) == (Status.OPTIMAL, 0)
    assert len(found.schedule) <= 12


def test_start_is_used_where_it_fits() -> None:
    problem = replace(chain(6), budget=5)
    start = solve_brute_force(problem).schedule
    assert solve_windows(problem, start=start).cost == evaluate(problem, start).cost


def test_the_gap_is_in_fractions_of_the_baseline() -> None:
    problem = replace(chain(12), budget=6)
    loose = solve_windows(problem, Limits(gap=0.5))
    assert loose.status is Status.OPTIMAL
    assert loose.gap(problem) <= 0.5


def test_without_time_the_answer_says_so() -> None:
    problem = replace(chain(40), budget=5)
    assert solve_windows(problem, Limits(time_s=0.0)).status is Status.TIME_LIMIT


def test_brute_force_refuses_large_problems() -> None:
    with pytest.raises(SolverError, match="use solve_windows"):
        solve_brute_force(chain(20))


@settings(max_examples=60, deadline=None)
@given(problems(9))
def test_whoever_watches_sees_costs_fall_and_bounds_rise_to_the_answer(problem: Problem) -> None:
    seen: list[tuple[float, float]] = []
    solution = solve_windows(problem, watch=lambda cost, bound: seen.append((cost, bound)))
    base = max(1, problem.baseline_cost)
    assert [cost for cost, _ in seen] == sorted((cost for cost, _ in seen), reverse=True)
    assert [bound for _, bound in seen] == sorted(bound for _, bound in seen)
    if solution.schedule:
        assert seen[-1][0] >= solution.cost / base
        assert all(bound <= solution.cost / base + 1e-6 for _, bound in seen)
