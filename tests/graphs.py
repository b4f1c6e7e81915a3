"""The published graphs that tests read, where they are present."""

import os
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import pytest
from problems import identity

from benchmarks.graph_files import load_graph
from remat.solvers import Problem, evaluate

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "graphs"
GRAPHS = Path(os.environ.get("REMAT_GRAPHS", DEFAULT))
FCN8 = "moccasin/fcn_8_vgg (MLSys)_32_(416, 608, 3)_train_nx.json"
RESNET50 = "moccasin/ResNet50 (MLSys)_256_(224, 224, 3)_train_nx.json"
RLG1 = "moccasin/random_layered_n100_w0.27_nlv0.75_ed0.2_scd0.14.json"
RLG2 = "moccasin/random_layered_n250_w0.43_nlv0.75_ed0.2_scd0.14.json"
RLG4 = "moccasin/random_layered_n1000_w0.31_nlv0.75_ed0.2_scd0.14.json"
GPT = "joint/gpt_L12.json"
GPT_48 = "joint/gpt_L48.json"
DENSENET = "dtr/dtr_tv_densenet121.json"


@cache
def graph(name: str, fraction: float) -> Problem:
    """The graph with a fraction of its peak as the budget."""
    path = GRAPHS / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set REMAT_GRAPHS")
    problem = load_graph(path)
    peak = evaluate(problem, identity(problem)).peak
    return replace(problem, budget=ceil(fraction * peak))
