"""Published graphs: known optima, and joint graphs of realistic size."""

import os
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import pytest
from problems import identity

from benchmarks.graph_files import load_graph
from remat.solvers import Limits, Problem, Status, evaluate, least_peak, solve_windows

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "graphs"
GRAPHS = Path(os.environ.get("REMAT_GRAPHS", DEFAULT))
FCN8 = "moccasin/fcn_8_vgg (MLSys)_32_(416, 608, 3)_train_nx.json"
RESNET50 = "moccasin/ResNet50 (MLSys)_256_(224, 224, 3)_train_nx.json"
GPT = "joint/gpt_L12.json"


@cache
def graph(name: str, fraction: float) -> Problem:
    """The graph with a fraction of its peak as the budget."""
    path = GRAPHS / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set REMAT_GRAPHS")
    problem = load_graph(path)
    peak = evaluate(problem, identity(problem)).peak
    return replace(problem, budget=ceil(fraction * peak))


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
        ("dtr/dtr_tv_densenet121.json", 0.5, 12.27, 12.4),
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
