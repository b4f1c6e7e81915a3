"""Solve published rematerialization graphs, one JSON line for each (graph, fraction of the peak).

    python -m benchmarks.graphs FOLDER --fractions .9,.8 --time-limit 60

FOLDER is searched for ``*.json``: networkx's node-link JSON, of three kinds (`graph_files`). Whatever is no
such graph is passed over, and named on stderr. A line has: graph, n (ops), m (edges),
fraction, status, overhead_percent and bound_percent (of the time of executing every op once; null if
there is no schedule), peak and budget (bytes), seconds.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from remat.solvers import Limits, Problem, evaluate, solve_windows

from .graph_files import load_graph


def lines(folder: Path, fractions: Sequence[Fraction], limits: Limits) -> Iterator[dict[str, Any]]:
    """One result for each graph and fraction, in the order of the file names.

    Raises:
        FileNotFoundError: there is no graph.
    """
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{folder} has no *.json graphs; name a folder that has")
    for file in files:
        try:
            problem = load_graph(file)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            print(f"{file} is passed over: not a graph ({error!r})", file=sys.stderr)
            continue
        for fraction in fractions:
            yield {"graph": file.stem, **solve(problem, fraction, limits)}


def solve(problem: Problem, fraction: Fraction, limits: Limits) -> dict[str, Any]:
    """Solve one graph with a fraction of its own peak as the budget."""
    own_peak = evaluate(problem, range(len(problem.ops))).peak
    budget = -int(-fraction * own_peak // 1)
    capped = replace(problem, budget=budget)
    start = time.perf_counter()
    found = solve_windows(capped, limits)
    seconds = time.perf_counter() - start
    percent = 100 / max(1, problem.baseline_cost)
    measured = evaluate(capped, found.schedule) if found.schedule else None
    bound = found.bound if found.bound != float("inf") else None
    return {
        "n": len(problem.ops),
        "m": sum(len(op.reads) for op in problem.ops),
        "fraction": float(fraction),
        "status": found.status,
        "overhead_percent": None if measured is None else round(percent * measured.cost, 4),
        "bound_percent": None if bound is None else round(percent * bound, 4),
        "peak": None if measured is None else measured.peak,
        "budget": budget,
        "seconds": round(seconds, 2),
    }


def main() -> int:
    """Print the lines; return the exit status."""
    parser = argparse.ArgumentParser(description="Solve a folder of rematerialization graphs")
    parser.add_argument("folder", type=Path, help="a folder of *.json graphs, or one such file")
    parser.add_argument("--fractions", default=".9,.8", help="of the graph's own peak")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve")
    parser.add_argument(
        "--gap", type=float, default=0.0, help="stop at this gap (0.001: 0.1 points)"
    )
    arguments = parser.parse_args()
    try:
        fractions = [Fraction(text) for text in arguments.fractions.split(",")]
    except ValueError as error:
        parser.error(f"--fractions, as in .9,.8: {error}")
    if not all(0 < fraction <= 1 for fraction in fractions):
        parser.error("--fractions: each above 0, and at most 1, as in .9,.8")
    if arguments.time_limit <= 0 or not 0 <= arguments.gap < 1:
        parser.error("--time-limit must be above 0, --gap at least 0 and below 1")
    limits = Limits(time_s=arguments.time_limit, gap=arguments.gap)
    count = 0
    try:
        for line in lines(arguments.folder, fractions, limits):
            print(json.dumps(line), flush=True)
            count += 1
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
