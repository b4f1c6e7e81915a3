"""The window model: memory is enforced exactly at a few instants, recomputation is summed between them.

Instants t_1 < .. < t_K are first executions; window k is what runs after t_k, up to and including the
first execution of t_{k+1} (of the last op for k = K). Storage s has size m_s and writer w(s).

Variables.
    S[s,k] = 1 if an instance of storage s is alive while t_k executes, and stays for a later read.
    R[v,k] = 1 if op v, first executed at or before t_k, is executed again in window k.

Objective.
    min Σ cost_v · R[v,k]

Constraints.
    (1) Σ_s m_s · S[s,k] <= budget - resident - scratch(t_k),                       → _memory_rows
        where what t_k reads or writes, and what is held until t_k, counts as if S were 1;
        S[s,k] = 0 for s in absent(t_k);
        for a pair (a, b) in reuse(t_k), b counts m_b · S[a,k] instead: only if a stays
    (2) S[s,k] = 1 where s is forced beyond t_k (`index.py`, definition 3) or m_s = 0   → _residency
    (3) S[s,k] + R[w(s),k] >= 1  if a first execution in window k reads s           → _reads_of_first
    (4) R[v,k] <= S[s,k] + R[w(s),k]  for s in reads(v)                            → _reads_of_repeated
        R[v,k] <= S[state(v),k]
    (5) S[s,k+1] <= S[s,k] + R[w(s),k];  S[state,k+1] <= S[state,k]                 → _carry_rows
    No R[v,k] for an op that is not a candidate, nor where repeating it cannot serve anything.

Every feasible schedule, with any number of recomputations in any order, maps to a solution that costs no
more, so the model's bound holds for all of them. The converse fails: memory between the instants is not
looked at, so a solution must be decoded, and evaluated exactly.

The model follows the "few peaks" idea measured in the project's notes; with K = n it is Checkmate's (Jain
et al., MLSys 2020) without the memory rows inside a stage. Solved by HiGHS through OR-Tools MathOpt. Memory
rows are divided by their right-hand side and costs are in percent of the baseline, because HiGHS accepts a
row that is violated by 1e-6.
"""

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ortools.math_opt.python import mathopt

from remat.ir import SolverError

from .index import Index
from .problem import FORBIDDEN, Problem

FLOOR_PERCENT = 5e-5
"""Absolute gap at which HiGHS may stop, in percent of the baseline; finer than any cost model."""


@dataclass(frozen=True, slots=True)
class Windows:
    """An answer of the model: what is kept at each instant and repeated after it."""

    instants: tuple[int, ...]
    """Ops, ascending."""
    kept: tuple[frozenset[int], ...]
    """Per instant: storages with S = 1 (those of size 0 and those that serve nothing are left out)."""
    repeated: tuple[frozenset[int], ...]
    """Per instant: ops with R = 1 in the window that it opens."""


@dataclass(frozen=True, slots=True)
class Span:
    """Restricts the model to what runs between its first and its last instant; the rest stays as it is."""

    start: frozenset[int]
    """Storages alive after the first instant."""
    end: frozenset[int]
    """Storages that must be alive after the last instant; nothing else is."""
    ops: tuple[int, ...]
    """Ops that may be repeated, ascending."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one solve gave."""

    windows: Windows | None
    """None if no solution was found."""
    bound: float
    """Proven lower bound on the objective, in the problem's unit of time."""
    infeasible: bool
    """Proven to have no solution."""
    timed_out: bool
    """The clock stopped it."""


@dataclass(slots=True)
class Build:
    """The MathOpt model while it is built."""

    problem: Problem
    table: Index
    instants: Sequence[int]
    model: mathopt.Model = field(default_factory=mathopt.Model)
    s: list[dict[int, mathopt.Variable | None]] = field(default_factory=list)
    """Per window: storage to its variable, None where S is fixed to 1."""
    r: list[dict[int, mathopt.Variable]] = field(default_factory=list)
    """Per window: op to its variable."""
    span: Span | None = None
    """None for the whole program."""

    @property
    def states(self) -> frozenset[int]:
        """Storages that are generator states."""
        return self.table.states

    def available(self, s: int, k: int) -> list[mathopt.Variable] | None:
        """The variables of which one must be 1 for s to be readable in window k; None if it is."""
        kept = self.kept(s, k)
        again = self.r[k].get(self.table.writer[s])
        return kept if kept is None or again is None else [*kept, again]

    def kept(self, s: int, k: int) -> list[mathopt.Variable] | None:
        """The variable that says whether s stays at instant k; none if it does not, None if it does."""
        if s not in self.s[k]:
            return []
        x = self.s[k][s]
        return None if x is None else [x]

    def at_most(self, x: mathopt.Variable | None, sources: list[mathopt.Variable] | None) -> None:
        """Add x <= Σ sources, where x None means 1 and sources None means no limit."""
        if sources is not None:
            add_at_most(self.model, x, sources)


def build_model(
    problem: Problem, table: Index, instants: Sequence[int], span: Span | None = None
) -> Build:
    """The model at these instants, for the problem's budget.

    Args:
        problem: with the budget to enforce.
        table: of the same ops.
        instants: ops, ascending.
        span: restricts it to what runs between the first and the last of them.
    """
    build = Build(problem, table, instants, span=span)
    _residency(build)
    _repetitions(build)
    _memory_rows(build)
    _reads_of_first(build)
    _reads_of_repeated(build)
    _carry_rows(build)
    return build


def solve_model(
    build: Build,
    *,
    gap: float,
    nodes: int,
    time_s: float,
    loose: float = 0.0,
) -> Answer:
    """Minimise the cost of the repetitions.

    Args:
        build: the model.
        gap: absolute gap at which to stop, as a fraction of the baseline cost.
        nodes: most branch-and-bound nodes.
        time_s: wall clock, seconds.
        loose: relative gap at which to stop.
    """
    scale = percent(build.problem)
    for window in build.r:
        for v, x in window.items():
            build.model.objective.set_linear_coefficient(x, build.problem.ops[v].cost * scale)
    result = run_highs(build.model, gap=gap, nodes=nodes, time_s=time_s, loose=loose)
    return _read(build, result, scale)


def percent(problem: Problem) -> float:
    """What makes of a cost percent of the baseline."""
    return 100.0 / max(problem.baseline_cost, 1)


def add_at_most(
    model: mathopt.Model, x: mathopt.Variable | None, sources: Iterable[mathopt.Variable]
) -> None:
    """Add x <= Σ sources, where x None means 1."""
    row = model.add_linear_constraint(lb=1.0 if x is None else 0.0)
    for source in sources:
        row.set_coefficient(source, 1.0)
    if x is not None:
        row.set_coefficient(x, -1.0)


def run_highs(
    model: mathopt.Model, *, gap: float, nodes: int, time_s: float, loose: float = 0.0
) -> mathopt.SolveResult:
    """Minimise a model whose objective is in percent of the baseline; see `solve_model`."""
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_s, 0.01)),
        node_limit=nodes,
        absolute_gap_tolerance=max(100.0 * gap, FLOOR_PERCENT),
        relative_gap_tolerance=loose,
    )
    return mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)


def proven_bound(result: mathopt.SolveResult, scale: float) -> float:
    """Lower bound on the objective in the problem's unit of time; infinite if there is no solution.

    Raises:
        SolverError: HiGHS gave up for a reason that is not a limit.
    """
    reason, limit = result.termination.reason, result.termination.limit
    if reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,  # cost >= 0: it cannot be unbounded
    ):
        return math.inf
    if limit is None and reason is not mathopt.TerminationReason.OPTIMAL:
        raise SolverError(f"HiGHS stopped with {reason}: {result.termination.detail}")
    return max(0.0, float(result.best_objective_bound()) / scale)


def _residency(build: Build) -> None:
    """(2) One S per storage that can matter after the instant; forced ones are fixed to 1."""
    problem, table, span = build.problem, build.table, build.span
    storages: Sequence[int] = range(len(problem.sizes)) if span is None else _in_span(build, span)
    for k, t in enumerate(build.instants):
        window: dict[int, mathopt.Variable | None] = {}
        for s in storages:
            if not 0 <= table.writer[s] <= t:
                continue
            if not problem.sizes[s] or table.forced[s] > t:
                window[s] = None
            elif span is not None and k in (0, len(build.instants) - 1):
                if s in (span.end if k else span.start):
                    window[s] = None
            elif table.need[s] > t:
                window[s] = build.model.add_binary_variable()
        build.s.append(window)


def _in_span(build: Build, span: Span) -> list[int]:
    """Storages that can matter in a span, ascending."""
    ops = (*span.ops, *range(build.instants[0] + 1, build.instants[-1] + 1))
    found = {*span.start, *span.end}
    for v in ops:
        op = build.problem.ops[v]
        found.update(op.writes if op.state is None else (*op.writes, op.state))
    # Whatever takes nothing is never dropped, so it can be read wherever it was written.
    found.update(s for v in ops for s in build.problem.ops[v].reads if not build.problem.sizes[s])
    return sorted(found)


def _repetitions(build: Build) -> None:
    """One R per candidate that writes something which may be absent and needed."""
    table, span = build.table, build.span
    for k, t in enumerate(build.instants):
        window: dict[int, mathopt.Variable] = {}
        ops: Sequence[int] = range(t + 1) if span is None else span.ops
        if span is not None and k == len(build.instants) - 1:
            ops = ()
        for v in ops:
            if v > t or table.need_op[v] <= t:
                continue
            writes = build.problem.ops[v].writes
            if any(table.need[s] > t and build.kept(s, k) is not None for s in writes):
                window[v] = build.model.add_binary_variable()
        build.r.append(window)


def _memory_rows(build: Build) -> None:
    """(1) Bytes at each instant, divided by the room that what is there anyway leaves."""
    problem, sizes = build.problem, build.problem.sizes
    for k, t in enumerate(build.instants):
        if build.span is not None and k in (0, len(build.instants) - 1):
            continue  # nothing is free there
        op = problem.ops[t]
        held = (
            s for s, last in enumerate(build.table.forced) if last >= t >= build.table.writer[s]
        )
        free = [s for s, x in build.s[k].items() if x is None]
        there = {*op.reads, *op.writes, *held, *free}
        moved = {a: b for a, b in op.reuse if a not in free}
        room = problem.budget - problem.resident - op.scratch
        room -= sum(sizes[s] for s in there.difference(moved.values()))
        room -= FORBIDDEN if there.intersection(op.absent) else 0
        row = build.model.add_linear_constraint(ub=1.0 if room > 0 else float(room))
        for s, x in build.s[k].items():
            if x is None or (s in there and s not in moved):
                continue
            size = sizes[moved.get(s, s)]
            if size > room or s in op.absent:
                x.upper_bound = 0.0
            else:
                row.set_coefficient(x, size / room)


def _reads_of_first(build: Build) -> None:
    """(3) What first executions of the window read was kept, or is recomputed in it."""
    n = len(build.problem.ops)
    for k, t in enumerate(build.instants):
        end = build.instants[k + 1] if k + 1 < len(build.instants) else n - 1
        if build.span is not None:
            end = min(end, build.instants[-1])
        reads = (s for op in build.problem.ops[t + 1 : end + 1] for s in op.reads)
        for s in dict.fromkeys(reads):
            if build.table.writer[s] <= t:
                build.at_most(None, build.available(s, k))


def _reads_of_repeated(build: Build) -> None:
    """(4) What a repetition reads was kept, or is recomputed in the same window."""
    for k, window in enumerate(build.r):
        for v, x in window.items():
            op = build.problem.ops[v]
            for s in op.reads:
                build.at_most(x, build.available(s, k))
            if op.state is not None:
                build.at_most(x, build.kept(op.state, k))


def _carry_rows(build: Build) -> None:
    """(5) What is alive at the next instant was alive at this one, or is recomputed between them."""
    for k in range(len(build.instants) - 1):
        for s, x in build.s[k + 1].items():
            if build.table.writer[s] > build.instants[k] or not build.problem.sizes[s]:
                continue
            if s in build.states:
                build.at_most(x, build.kept(s, k))
            else:
                build.at_most(x, build.available(s, k))


def _read(build: Build, result: mathopt.SolveResult, scale: float) -> Answer:
    """Translate HiGHS's result; values are rounded, and believed only after the exact evaluation."""
    bound = proven_bound(result, scale)
    timed_out = result.termination.limit is mathopt.Limit.TIME
    if bound == math.inf:
        return Answer(None, bound, True, timed_out)
    if not result.has_primal_feasible_solution():
        return Answer(None, bound, False, timed_out)
    value = result.variable_values()
    kept = tuple(
        frozenset(s for s, x in window.items() if x is None or round(value[x]) == 1)
        for window in build.s
    )
    repeated = tuple(
        frozenset(v for v, x in window.items() if round(value[x]) == 1) for window in build.r
    )
    return Answer(Windows(tuple(build.instants), kept, repeated), bound, False, timed_out)
