"""Named problems with a known optimum, on every solver; and who may look at whose code.

Chains: reversing a chain of l steps with s checkpoints takes at least t(l, s) = r l - C(s + r, s + 1) forward
steps, where r is the least number with C(s + r, s) >= l (Griewank & Walther, "Algorithm 799: revolve", ACM
TOMS 26(1), 2000). The first state counts as a checkpoint there, and the current state as none.

In `problems.chain` with unit sizes and a budget of M bytes, a backward op in the middle has its own output,
the gradient that it reads and one forward output, so M - 3 other forward outputs may be kept; the source of
the chain costs nothing to keep, so s = M - 2. The first backward op reads no gradient, so the last but one
output is there when it is read: the chain to reverse has l steps, not l + 1, after one step more. Of the
t(l, M - 2) + 1 forward executions, l are first ones.
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest
from graphs import DENSENET, FCN8, GPT, GPT_48, RESNET50, RLG1, RLG2, RLG4, graph
from problems import chain

from remat.solvers import (
    Limits,
    Problem,
    Solution,
    Status,
    evaluate,
    least_peak,
    solve_brute_force,
    solve_cp_sat,
    solve_greedy,
    solve_windows,
)

Solver = Callable[[Problem], Solution]
EXACT: list[Solver] = [solve_windows, solve_cp_sat, solve_brute_force]
SOLVERS = Path(__file__).resolve().parent.parent / "solvers"


def fewest_repetitions(length: int, budget: int) -> int:
    """Of a unit chain, by the formula above."""
    checkpoints = budget - 2
    sweeps = 0
    while comb(checkpoints + sweeps, checkpoints) < length:
        sweeps += 1
    steps = sweeps * length - comb(checkpoints + sweeps, checkpoints + 1)
    return steps + 1 - length


def check(problem: Problem, found: Solution, optimum: int) -> None:
    """A feasible schedule that is no cheaper than the optimum, and no bound above it."""
    measured = evaluate(problem, found.schedule)
    assert measured.feasible
    assert measured.cost == found.cost >= optimum
    assert found.bound <= optimum + 1e-6
    if found.status is Status.OPTIMAL:
        assert found.cost == optimum


@pytest.mark.parametrize("length", range(2, 7))
def test_the_formula_of_the_chain_is_what_exhaustive_search_finds(length: int) -> None:
    for budget in range(3, length + 2):
        exact = solve_brute_force(replace(chain(length), budget=budget))
        assert exact.cost == fewest_repetitions(length, budget)


@pytest.mark.parametrize("solve", EXACT)
@pytest.mark.parametrize(("length", "budget"), [(7, 4), (8, 6)])
def test_every_exact_solver_finds_the_optimum_of_a_chain(
    solve: Solver, length: int, budget: int
) -> None:
    problem = replace(chain(length), budget=budget)
    found = solve(problem)
    check(problem, found, fewest_repetitions(length, budget))
    assert found.status is Status.OPTIMAL


@pytest.mark.parametrize(("length", "budget"), [(12, 3), (20, 8), (30, 12), (50, 30)])
def test_the_greedy_solver_fits_a_chain(length: int, budget: int) -> None:
    problem = replace(chain(length), budget=budget)
    found = solve_greedy(problem)
    optimum = fewest_repetitions(length, budget)
    check(problem, found, optimum)
    assert found.cost <= 2 * optimum


@pytest.mark.parametrize(("length", "budget"), [(16, 3), (20, 10), (50, 30)])
def test_windows_proves_the_optimum_of_a_longer_chain(length: int, budget: int) -> None:
    problem = replace(chain(length), budget=budget)
    found = solve_windows(problem)
    check(problem, found, fewest_repetitions(length, budget))
    assert found.status is Status.OPTIMAL


@pytest.mark.parametrize("length", [5, 20, 40])
def test_the_least_peak_of_a_chain_is_what_one_op_touches(length: int) -> None:
    assert least_peak(chain(length)).peak == 3


# Checkmate with Gurobi, as reported by MOCCASIN (Bartan et al., ICML 2023, table 2): 0.0, 0.1, 0.1, 0.3 on
# fcn8 and ResNet50; MOCCASIN 0.9 on the graph of 250 nodes and 0.7, not proven, on that of 1000.
PUBLISHED = [
    (FCN8, 0.9, 0.029),
    (FCN8, 0.8, 0.136),
    (RESNET50, 0.9, 0.108),
    (RESNET50, 0.8, 0.279),
    (RLG1, 0.9, 0.789),
    (RLG1, 0.8, 2.296),
]


@pytest.mark.parametrize(("name", "fraction", "percent"), PUBLISHED)
def test_the_greedy_solver_reaches_published_optima(
    name: str, fraction: float, percent: float
) -> None:
    problem = graph(name, fraction)
    found = solve_greedy(problem)
    assert evaluate(problem, found.schedule).feasible
    assert 100 * found.cost / problem.baseline_cost == pytest.approx(percent, abs=5e-4)
    assert found.status is Status.FEASIBLE
    assert found.bound == 0


@pytest.mark.parametrize(
    ("name", "fraction", "optimum"),
    [
        pytest.param(GPT, 0.3, 17.344, marks=pytest.mark.slow),
        (DENSENET, 0.5, 12.281),
    ],
)
def test_the_greedy_solver_is_near_the_optimum_of_a_large_graph(
    name: str, fraction: float, optimum: float
) -> None:
    problem = graph(name, fraction)
    found = solve_greedy(problem)
    assert evaluate(problem, found.schedule).feasible
    assert optimum - 1e-3 <= 100 * found.cost / problem.baseline_cost <= optimum + 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fraction", "percent"), [*PUBLISHED, (RLG2, 0.9, 0.904), (RLG4, 0.9, 0.683)]
)
def test_windows_proves_published_optima(name: str, fraction: float, percent: float) -> None:
    problem = graph(name, fraction)
    found = solve_windows(problem, Limits(time_s=120.0))
    assert evaluate(problem, found.schedule).feasible
    assert found.status is Status.OPTIMAL
    assert 100 * found.cost / problem.baseline_cost == pytest.approx(percent, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fraction", "optimum"),
    [(RLG2, 0.9, 0.904), (RLG4, 0.9, 0.683), (GPT_48, 0.5, 10.304)],
)
def test_the_greedy_solver_fits_the_largest_graphs(
    name: str, fraction: float, optimum: float
) -> None:
    problem = graph(name, fraction)
    found = solve_greedy(problem)
    assert evaluate(problem, found.schedule).feasible
    assert optimum - 1e-3 <= 100 * found.cost / problem.baseline_cost <= 1.2 * optimum


def imported(path: Path) -> set[str]:
    """What a module imports from this package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith((".", "remat"))}


def test_the_evaluator_shares_no_code_with_a_solver() -> None:
    assert imported(SOLVERS / "evaluate.py") == {".problem", "remat.ir"}
    assert imported(SOLVERS / "problem.py") == set()
