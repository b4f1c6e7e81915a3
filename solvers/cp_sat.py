"""Checkmate's model in CP-SAT, for graphs of up to about a hundred ops.

Stage t is what runs after the first execution of op t - 1 and up to that of op t. Storage s has size m_s
and writer w(s). All quantities are integers, so nothing is rounded (Jain et al., MLSys 2020, with executions
on ops and residency on storages).

Variables.
    S[t,s] = 1 if storage s is alive when stage t begins, for a later read.
    R[t,v] = 1 if op v < t is executed again in stage t.

Objective.
    min Σ cost_v · R[t,v]

Constraints.
    (1) S[t,s] + R[t,w(s)] >= 1 for s in reads(t)                           → _reads
    (2) R[t,v] <= S[t,s] + R[t,w(s)] for s in reads(v); R[t,v] <= S[t,state(v)]     → _reads
    (3) S[t+1,s] <= S[t,s] + R[t,w(s)] for w(s) < t; S[t+1,state] <= S[t,state]     → _carries
    (4) Σ of what t reads, writes or is held + Σ other m_s · S[t+1,s]
        <= budget - resident - scratch(t)                                   → _memory
        where for (a, b) in reuse(t), b counts m_b · S[t+1,a]
    (5) the same while op j is repeated in stage t, where repetitions run in program order: what was there
        or was repeated before j, and is read after it                      → _stage_memory

Every feasible schedule, with any number of recomputations, satisfies (1) to (4), so the bound comes from
these alone. (5) is added lazily, where a decoded schedule exceeds the budget; it leaves out schedules that
repeat an op twice in a stage or in another order, so it serves to find schedules, not to prove.
"""

import time
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from .decode import decode
from .evaluate import evaluate, excesses
from .improve import drop_repetitions, prune
from .index import Index, forced_bytes, index
from .problem import DEFAULT_LIMITS, Limits, Problem, Solution, Status
from .window_model import Windows

ROUNDS = 30
"""Times that rows (5) are added."""
NEW_ROWS = 8
"""Rows (5) added in one round."""
EFFORT = 60.0
"""CP-SAT's deterministic time of one solve, about seconds."""


@dataclass(slots=True)
class _Model:
    """The CP-SAT model while it is built; dictionaries by stage, None where a variable is fixed to 1."""

    problem: Problem
    table: Index
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    s: list[dict[int, cp_model.IntVar | None]] = field(default_factory=list)
    r: list[dict[int, cp_model.IntVar]] = field(default_factory=list)

    def require(self, conditions: list[cp_model.IntVar | None], s: int, t: int) -> None:
        """If all conditions hold, storage s was alive when stage t began, or is recomputed in it."""
        if s in self.s[t] and self.s[t][s] is None:
            return
        sources = [] if s not in self.s[t] else [self.s[t][s]]
        if s not in self.table.states:
            sources.append(self.r[t].get(self.table.writer[s]))
        clause = [x for x in sources if x is not None]
        self.model.add_bool_or([*clause, *(~x for x in conditions if x is not None)])


def solve_cp_sat(problem: Problem, limits: Limits = DEFAULT_LIMITS) -> Solution:
    """Cheapest schedule that fits the budget, for small problems.

    Args:
        problem: what to solve; beyond a hundred ops expect it to run into the limits.
        limits: when to stop.
    """
    deadline = time.monotonic() + limits.time_s
    table = index(problem)
    best = tuple(range(len(problem.ops)))
    measured = evaluate(problem, best)
    if measured.feasible:
        return Solution(Status.OPTIMAL, best, 0, measured.peak, 0.0, problem.bound_class)
    infeasible = Solution(Status.INFEASIBLE, (), 0, 0, float("inf"), problem.bound_class)
    if max(forced_bytes(problem)) > problem.budget:
        return infeasible
    best = prune(problem, decode(problem, table, None, problem.budget))
    if best and not evaluate(problem, best).feasible:
        best = ()
    bound = 0.0
    rows: list[tuple[int, int]] = []
    timed_out = False
    for _ in range(ROUNDS):
        solver = _solver(deadline - time.monotonic())
        build = _build(problem, table, rows)
        status = solver.solve(build.model)
        timed_out = deadline <= time.monotonic()
        if status == cp_model.INFEASIBLE and not rows:
            return infeasible
        if not rows:
            bound = max(0.0, solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        schedule = prune(problem, decode(problem, table, _windows(build, solver), None))
        measured = evaluate(problem, schedule)
        if measured.feasible:
            best = min(best or schedule, schedule, key=lambda x: evaluate(problem, x).cost)
            break
        worst = [(t, v) for _, t, v in excesses(problem, schedule) if v < t and (t, v) not in rows]
        if not worst or timed_out:
            break
        rows += worst[:NEW_ROWS]
    return _solution(problem, limits, best, bound, timed_out)


def _solution(
    problem: Problem, limits: Limits, schedule: tuple[int, ...], bound: float, timed_out: bool
) -> Solution:
    """What is known at the end."""
    if not schedule:
        return Solution(Status.UNKNOWN, (), 0, 0, bound, problem.bound_class)
    schedule = drop_repetitions(problem, schedule)
    measured = evaluate(problem, schedule)
    status = Status.TIME_LIMIT if timed_out else Status.FEASIBLE
    if measured.cost - bound <= limits.gap * problem.baseline_cost + 1e-6:
        status = Status.OPTIMAL
    bound = min(bound, measured.cost)
    return Solution(status, schedule, measured.cost, measured.peak, bound, problem.bound_class)


def _solver(time_s: float) -> cp_model.CpSolver:
    """One worker and a fixed seed: the same model gives the same answer."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = EFFORT
    solver.parameters.max_time_in_seconds = max(time_s, 0.01)
    return solver


def _build(problem: Problem, table: Index, rows: list[tuple[int, int]]) -> _Model:
    """The model with the rows (5) of each (t, j)."""
    build = _Model(problem, table)
    _variables(build)
    _reads(build)
    _carries(build)
    _memory(build)
    for t, j in rows:
        _stage_memory(build, t, j)
    terms = [(problem.ops[v].cost, x) for stage in build.r for v, x in stage.items()]
    build.model.minimize(
        cp_model.LinearExpr.weighted_sum([x for _, x in terms], [cost for cost, _ in terms])
    )
    return build


def _variables(build: _Model) -> None:
    """S and R where they can matter; S is fixed where the storage is forced, or takes nothing."""
    problem, table = build.problem, build.table
    for t in range(len(problem.ops) + 1):
        stage: dict[int, cp_model.IntVar | None] = {}
        for s, size in enumerate(problem.sizes):
            if 0 <= table.writer[s] < t and (not size or table.forced[s] >= t):
                stage[s] = None
            elif 0 <= table.writer[s] < t and table.need[s] >= t:
                stage[s] = build.model.new_bool_var(f"S[{t},{s}]")
        build.s.append(stage)
        again = (v for v in range(t) if table.need_op[v] >= t)
        build.r.append({v: build.model.new_bool_var(f"R[{t},{v}]") for v in again})


def _reads(build: _Model) -> None:
    """(1) and (2)."""
    for t, op in enumerate(build.problem.ops):
        for s in op.reads:
            build.require([], s, t)
        for v, x in build.r[t].items():
            repeated = build.problem.ops[v]
            state = () if repeated.state is None else (repeated.state,)
            for s in (*repeated.reads, *state):
                build.require([x], s, t)


def _carries(build: _Model) -> None:
    """(3)."""
    for t in range(len(build.problem.ops)):
        for s, x in build.s[t + 1].items():
            if build.table.writer[s] < t and build.problem.sizes[s]:
                build.require([x], s, t)


def _memory(build: _Model) -> None:
    """(4)."""
    problem, table = build.problem, build.table
    for t, op in enumerate(problem.ops):
        held = (s for s, last in enumerate(table.forced) if last >= t >= table.writer[s])
        # Of a pair in reuse, b counts only if a stays.
        moved = {a: b for a, b in op.reuse if table.forced[a] <= t and problem.sizes[a]}
        there = {*op.reads, *op.writes, *held}
        room = problem.budget - problem.resident - op.scratch
        room -= sum(problem.sizes[s] for s in there.difference(moved.values()))
        fixed = there.difference(moved)
        others = [(s, x) for s, x in build.s[t + 1].items() if x is not None and s not in fixed]
        build.model.add_bool_and([~x for s, x in others if s in op.absent])
        build.model.add(
            cp_model.LinearExpr.weighted_sum(
                [x for _, x in others], [problem.sizes[s] for s, _ in others]
            )
            <= room
        )


def _stage_memory(build: _Model, t: int, j: int) -> None:
    """(5) Bytes while op j is repeated in stage t."""
    problem, table = build.problem, build.table
    op, again = problem.ops[j], build.r[t][j]
    touched = {*op.reads, *op.writes} | ({op.state} if op.state is not None else set[int]())
    room = problem.budget - problem.resident - op.scratch - op.repeat_scratch
    room -= sum(problem.sizes[s] for s in touched)
    alive: list[cp_model.IntVar] = []
    sizes: list[int] = []
    for s, kept in build.s[t].items():
        if s in touched or not problem.sizes[s]:
            continue
        present: list[cp_model.IntVar | None] = [kept]
        early = build.r[t].get(table.writer[s])
        if kept is not None and early is not None and table.writer[s] < j:
            present += [early] if s not in table.states else []
        x = build.model.new_bool_var("")
        for there in present:
            for wanted in _needed(build, s, t, j):
                clause = [~y for y in (there, wanted) if y is not None]
                build.model.add_bool_or([*clause, ~again, x])
        alive.append(x)
        sizes.append(problem.sizes[s])
    total = cp_model.LinearExpr.weighted_sum(alive, sizes)
    build.model.add(total <= room).only_enforce_if(again)


def _needed(build: _Model, s: int, t: int, j: int) -> list[cp_model.IntVar | None]:
    """What keeps s in memory after j is repeated in stage t; None if something does so anyway."""
    following = build.s[t + 1]
    if (
        s in build.problem.ops[t].reads
        or build.table.forced[s] >= t
        or (s in following and following[s] is None)
    ):
        return [None]
    needed: list[cp_model.IntVar | None] = [following[s]] if s in following else []
    readers = (build.table.writer[s],) if s in build.table.states else build.table.readers[s]
    return needed + [build.r[t][c] for c in readers if c > j and c in build.r[t]]


def _windows(build: _Model, solver: cp_model.CpSolver) -> Windows:
    """The solution as a plan that drops at every instant."""
    n = len(build.problem.ops)
    kept = tuple(
        frozenset(s for s, x in build.s[t].items() if x is None or solver.boolean_value(x))
        for t in range(1, n + 1)
    )
    repeated = tuple(
        frozenset(v for v, x in build.r[t].items() if solver.boolean_value(x))
        for t in range(1, n + 1)
    )
    return Windows(tuple(range(n)), kept, repeated)
