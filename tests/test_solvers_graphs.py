"""Published graphs: known optima, and joint graphs of realistic size."""

import pytest
from graphs import DENSENET, FCN8, GPT, RESNET50, graph

from remat.solvers import Limits, Status, evaluate, least_peak, solve_windows


@pytest.mark.parametrize(
    ("name", "fraction", "percent"),
    [
        # Checkmate with Gurobi, as reported by MOCCASIN (ICML 2023): 0.0, 0.1, 0.1, 0.3.
        (FCN8, 0.9, 0.029),
        (FCN8, 0.8, 0.136),
        (RESNET50, 0.9, 0.108),
        (RESNET50, 0.8, 0.279),
        (RESNET50, 0.5, 1.499),
    ],
)
def test_reproduces_published_optima(name: str, fraction: float, percent: float) -> None:
    problem = graph(name, fraction)
    found = solve_windows(problem)
    assert found.status is Status.OPTIMAL
    assert evaluate(problem, found.schedule).feasible
    assert 100 * found.cost / problem.baseline_cost == pytest.approx(percent, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "fraction", "low", "high"),
    [
        (GPT, 0.8, 2.25, 2.3),
        (GPT, 0.5, 10.78, 10.9),
        (GPT, 0.3, 17.3, 17.9),
        (DENSENET, 0.5, 12.27, 12.4),
    ],
)
def test_a_large_graph_is_solved_to_half_a_point(
    name: str, fraction: float, low: float, high: float
) -> None:
    problem = graph(name, fraction)
    found = solve_windows(problem, Limits(gap=0.005))
    assert found.status is Status.OPTIMAL
    assert evaluate(problem, found.schedule).feasible
    assert found.bound <= high / 100 * problem.baseline_cost
    assert low <= 100 * found.cost / problem.baseline_cost <= high + 0.5


def test_the_least_peak_of_a_joint_graph_is_near_what_single_ops_need() -> None:
    problem = graph(GPT, 1.0)
    found = least_peak(problem)
    assert found.peak <= 0.13 * problem.budget
    assert evaluate(problem, found.schedule).peak == found.peak
