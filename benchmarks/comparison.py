"""One model's comparison: all peers' programs, the budgets taken from them, and our plans under these."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat.orders import Arranged, arranged, choose, least_of
from remat.solvers import Limits, Solution, solve_greedy, solve_windows

from .peers.checkmate import checkmate
from .peers.checkpoint import checkpoint_blocks, chen_sqrt
from .peers.dtr import dtr_greedy
from .peers.rotor import rotor_chain
from .peers.torch_budget import torch_budgets
from .real_models import Case
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
