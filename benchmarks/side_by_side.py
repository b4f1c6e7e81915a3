"""Plans of `remat` beside those of other systems, on the same graphs: one command, one table, one run.

    python -m benchmarks.side_by_side [--models gpt2,resnet50] [--time-limit 20] [--json out.jsonl]

For every model, each peer gives programs on the same joint graph, and all are judged by the same evaluator
(see `step.py`). Of the peaks that some peer reaches at less time than every other, a few are taken: each
peer's least peak, and others spread between the least and the greatest. Each is then our budget. A table
has, at each of them, the cheapest peer that needs no more, our plan with its proven bound, and our greedy.

Prints Markdown. A peak counts parameters, batch, gradients and activations, but no optimizer state.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from remat.ir import UnsupportedGraphError
from remat.orders import Arranged, arranged, choose, least_of
from remat.solvers import Limits, Solution, solve_greedy, solve_windows

from .peers.checkmate import checkmate
from .peers.checkpoint import checkpoint_blocks, chen_sqrt
from .peers.dtr import dtr_greedy
from .peers.rotor import rotor_chain
from .peers.torch_budget import torch_budgets
from .real_models import CASES, Case
from .step import Step, capture_step, judge

Peer = Callable[[Step], Iterator[tuple[str, tuple[int, ...]]]]
PEERS: tuple[tuple[str, Peer], ...] = (
    ("torch.utils.checkpoint", checkpoint_blocks),
    ("Chen √n", chen_sqrt),
    ("rotor", rotor_chain),
    ("torch budget", torch_budgets),
    ("DTR", dtr_greedy),
    ("Checkmate MILP", checkmate),
)
CLOSE = 0.01
"""Peaks that differ by less than this fraction count as one."""
EQUAL = 1e-4
"""Overheads that differ by less than this fraction of a step count as equal."""
LEAST = 1e-3
"""In ratios, no overhead is taken to be less than this fraction of a step."""


@dataclass(frozen=True)
class Point:
    """One program of a peer."""

    peer: str
    label: str
    peak: int
    """Bytes."""
    overhead: float
    """Extra time, fraction of the step's."""
    seconds: float
    """Time to plan it."""
    executions: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Row:
    """One budget: the peers and we."""

    model: str
    budget: int
    """Bytes: the peak that `reached_by` has."""
    reached_by: str
    peer_overhead: float
    """Of the cheapest peer within the budget."""
    overhead: float
    """Ours; infinite if no plan was found."""
    bound: float
    """No program with this order of first executions costs less."""
    status: str
    seconds: float
    greedy_overhead: float
    """Of our greedy; infinite if it found none."""
    greedy_seconds: float

    @property
    def worse(self) -> bool:
        """A peer needs less time than we at this peak."""
        return self.overhead > self.peer_overhead + EQUAL


@dataclass(frozen=True)
class Comparison:
    """One model."""

    case: Case
    ops: int
    resident: int
    eager_peak: int
    """Peak of the program as it is, bytes."""
    capture_s: float
    points: tuple[Point, ...]
    rows: tuple[Row, ...]
    least: int
    """Least peak that we reach, bytes."""
    least_s: float

    def least_of_peers(self) -> dict[str, int]:
        """Least peak of each peer, bytes."""
        found: dict[str, int] = {}
        for point in self.points:
            found[point.peer] = min(found.get(point.peer, point.peak), point.peak)
        return found


def run_peers(step: Step, say: Callable[[str], None] = lambda line: None) -> list[Point]:
    """All programs of all peers, judged."""
    points: list[Point] = []
    base = step.problem.baseline_cost
    for peer, programs in PEERS:
        before = time.perf_counter()
        for label, executions in programs(step):
            seconds = time.perf_counter() - before
            found = judge(step.problem, executions)
            points.append(Point(peer, label, found.peak, found.cost / base, seconds, executions))
            before = time.perf_counter()
        say(f"{step.case.name}: {peer} done")
    return points


def choose_peaks(points: Sequence[Point], count: int) -> list[Point]:
    """Each peer's least peak, and others of the common frontier, spread evenly; greatest first.

    Peaks that some peer reaches without repeating anything are left out.
    """
    free = min((p.peak for p in points if p.overhead == 0), default=sys.maxsize)
    paid = sorted((p for p in points if p.peak < free), key=lambda p: (p.peak, p.overhead))
    frontier: list[Point] = []
    ends: dict[str, Point] = {}
    for point in paid:
        ends.setdefault(point.peer, point)
        if not frontier or point.overhead < frontier[-1].overhead - EQUAL:
            frontier.append(point)
    last = len(frontier) - 1
    spread = [frontier[i * last // max(1, count - 1)] for i in range(count if paid else 0)]
    chosen: list[Point] = []
    for point in sorted([*ends.values(), *spread], key=lambda p: (p.peak, p.overhead)):
        if not chosen or point.peak > chosen[-1].peak * (1 + CLOSE):
            chosen.append(point)
    return chosen[::-1]


def compare(
    case: Case,
    device: str,
    limits: Limits,
    count: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Step, Comparison]:
    """Run everything for one model.

    Raises:
        UnsupportedGraphError: it cannot be captured.
    """
    begin = time.perf_counter()
    step = capture_step(case, device)
    captured = time.perf_counter()
    capture_s = captured - begin
    problem = step.problem
    say(f"{case.name}: captured, {len(problem.ops)} ops, {capture_s:.0f} s")
    points = run_peers(step, say)
    begin = time.perf_counter()
    candidates = arranged(step.prepared, step.formulated, limits)
    least = least_of(candidates).least
    least_s = time.perf_counter() - begin
    rows: list[Row] = []
    for point in choose_peaks(points, count):
        ours, seconds = _timed(_plan, candidates, point.peak, limits)
        greedy, greedy_s = _timed(_greedy, candidates, point.peak, limits)
        base = problem.baseline_cost
        rows.append(
            Row(
                model=case.name,
                budget=point.peak,
                reached_by=point.label,
                peer_overhead=min(p.overhead for p in points if p.peak <= point.peak),
                overhead=_overhead(ours, base),
                bound=ours.bound / base,
                status=str(ours.status),
                seconds=seconds,
                greedy_overhead=_overhead(greedy, base),
                greedy_seconds=greedy_s,
            )
        )
        say(f"{case.name}: {rows[-1]}")
    comparison = Comparison(
        case=case,
        ops=len(problem.ops),
        resident=problem.resident,
        eager_peak=judge(problem, step.program).peak,
        capture_s=capture_s,
        points=tuple(points),
        rows=tuple(rows),
        least=least.peak,
        least_s=least_s,
    )
    return step, comparison


def _plan(candidates: Sequence[Arranged], budget: int, limits: Limits) -> Solution:
    """What our planner plans under a budget, in the order that it chooses."""
    chosen = choose(_capped(candidates, budget))
    fits = chosen.least.peak <= budget
    return solve_windows(chosen.problem, limits, start=chosen.least.schedule if fits else ())


def _greedy(candidates: Sequence[Arranged], budget: int, limits: Limits) -> Solution:
    """The cheapest of our greedy's answers in any of the orders."""
    found = [solve_greedy(c.problem, limits) for c in _capped(candidates, budget)]
    return min(found, key=lambda solution: (not solution.schedule, solution.cost))


def _capped(candidates: Sequence[Arranged], budget: int) -> list[Arranged]:
    return [replace(c, problem=replace(c.problem, budget=budget)) for c in candidates]


def _timed(solve: Callable[..., Solution], *args: Any) -> tuple[Solution, float]:
    begin = time.perf_counter()
    return solve(*args), time.perf_counter() - begin


def _overhead(solution: Solution, base: int) -> float:
    return solution.cost / base if solution.schedule else math.inf


def table(comparison: Comparison) -> str:
    """Markdown of one model."""
    case = comparison.case
    lines = [
        f"### {case.name}: {case.text}",
        "",
        f"{comparison.ops} ops; {_gb(comparison.resident)} resident; "
        f"as it is the step peaks at {_gb(comparison.eager_peak)}.",
        "",
        "| peak | reached by | best peer | ours | bound | s | our greedy | s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in comparison.rows:
        mark = " **worse**" if row.worse else ""
        lines.append(
            f"| {_gb(row.budget)} | {row.reached_by} | {_percent(row.peer_overhead)} "
            f"| {_percent(row.overhead)}{mark} | {_percent(row.bound)} | {row.seconds:.1f} "
            f"| {_percent(row.greedy_overhead)} | {row.greedy_seconds:.1f} |"
        )
    least = sorted(comparison.least_of_peers().items(), key=lambda item: item[1])
    texts = [f"{peer} {_gb(peak)}" for peer, peak in least]
    lines += [
        "",
        f"Least peak: ours {_gb(comparison.least)} ({comparison.least_s:.1f} s); {', '.join(texts)}.",
        "",
    ]
    return "\n".join(lines)


def summary(comparisons: Sequence[Comparison]) -> str:
    """Markdown of all models together."""
    rows = [row for comparison in comparisons for row in comparison.rows]
    ours = [r for r in rows if math.isfinite(r.overhead)]
    beside = [r for r in ours if math.isfinite(r.greedy_overhead)]
    lines = [
        "| | |",
        "| --- | ---: |",
        f"| budgets compared | {len(rows)} |",
        f"| a peer is better than we are | {sum(r.worse for r in rows)} |",
        f"| our overhead over the best peer's, geometric mean | {_mean_ratio(ours):.2f} |",
        f"| our greedy's overhead over the best peer's, geometric mean | "
        f"{_mean_ratio(beside, 'greedy_overhead'):.2f} |",
        f"| our overhead over our greedy's, geometric mean | "
        f"{_mean_ratio(beside, 'overhead', 'greedy_overhead'):.2f} |",
        f"| budgets at which our greedy finds nothing | {len(rows) - len(beside)} |",
        f"| proven optimal (for the order of first executions) | "
        f"{sum(r.status == 'optimal' for r in rows)} |",
    ]
    for comparison in comparisons:
        peer = min(comparison.least_of_peers().values())
        lines.append(
            f"| least peak over the best peer's, {comparison.case.name} "
            f"| {comparison.least / peer:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _mean_ratio(
    rows: Sequence[Row], ours: str = "overhead", theirs: str = "peer_overhead"
) -> float:
    """Geometric mean of the ratio of overheads, none taken to be below `LEAST`."""
    logs = [
        math.log(max(getattr(row, ours), LEAST) / max(getattr(row, theirs), LEAST)) for row in rows
    ]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %" if math.isfinite(part) else "none"


def _records(comparison: Comparison) -> Iterable[dict[str, Any]]:
    """One line of JSON for each row, each peer's program, and the model."""
    model = comparison.case.name
    for row in comparison.rows:
        yield {"kind": "row", **asdict(row)}
    for point in comparison.points:
        yield {
            "kind": "peer",
            "model": model,
            "peer": point.peer,
            "label": point.label,
            "peak": point.peak,
            "overhead": point.overhead,
            "seconds": point.seconds,
        }
    yield {
        "kind": "model",
        "model": model,
        "ops": comparison.ops,
        "resident": comparison.resident,
        "eager_peak": comparison.eager_peak,
        "least": comparison.least,
        "least_seconds": comparison.least_s,
        "capture_seconds": comparison.capture_s,
    }


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run, print, and write; return the exit status."""
    parser = argparse.ArgumentParser(description="plans of remat beside those of other systems")
    names = [case.name for case in CASES]
    parser.add_argument("--models", default=",".join(names), help="of: " + ", ".join(names))
    parser.add_argument(
        "--device", default="a100-80gb", help="whose kernels and speed are planned"
    )
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for one plan")
    parser.add_argument("--peaks", type=int, default=4, help="budgets beside the least peaks")
    parser.add_argument("--json", type=Path, help="file for all figures, one JSON object a line")
    arguments = parser.parse_args()
    wanted = arguments.models.split(",")
    limits = Limits(time_s=arguments.time_limit)
    if arguments.json:
        arguments.json.write_text("")
    done: list[Comparison] = []
    for case in CASES:
        if case.name not in wanted:
            continue
        try:
            _, found = compare(case, arguments.device, limits, arguments.peaks, _progress)
        except UnsupportedGraphError as error:
            print(f"### {case.name}: {case.text}\n\nNot captured: {error}\n", flush=True)
            continue
        done.append(found)
        print(table(found), flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in _records(found))
    print(summary(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
