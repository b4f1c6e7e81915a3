from dataclasses import replace

from hypothesis import given, settings
from problems import chain, problems

from remat.solvers import Problem, drop_repetitions, evaluate, forced_bytes, least_peak, prune


def test_prune_leaves_out_repetitions_that_only_serve_each_other() -> None:
    assert prune(chain(3), (0, 1, 2, 0, 1, 3, 1, 4, 5)) == (0, 1, 2, 0, 3, 1, 4, 5)
    assert prune(chain(3), (0, 1, 2, 3, 4, 5, 0, 1)) == (0, 1, 2, 3, 4, 5)


def test_drop_repetitions_keeps_what_fits() -> None:
    problem = replace(chain(3), budget=4)
    assert drop_repetitions(problem, (0, 1, 2, 3, 0, 1, 4, 0, 5)) == (0, 1, 2, 3, 4, 5)


@settings(deadline=None)
@given(problems(10))
def test_improving_a_schedule_never_harms(problem: Problem) -> None:
    schedule = least_peak(problem).schedule
    before = evaluate(problem, schedule)
    pruned = evaluate(problem, prune(problem, schedule))
    after = evaluate(problem, drop_repetitions(problem, schedule))
    assert after.cost <= pruned.cost <= before.cost
    assert pruned.peak <= before.peak
    assert after.peak <= max(problem.budget, pruned.peak)


@settings(deadline=None)
@given(problems(10))
def test_no_schedule_takes_less_than_the_forced_bytes(problem: Problem) -> None:
    for schedule in (least_peak(problem).schedule, tuple(range(len(problem.ops)))):
        used = evaluate(problem, schedule).bytes
        at = [schedule.index(v) for v in range(len(problem.ops))]
        assert all(used[p] >= low for p, low in zip(at, forced_bytes(problem), strict=True))


def test_forced_bytes_of_a_chain_are_what_one_op_touches() -> None:
    assert forced_bytes(chain(3)) == (1, 2, 2, 2, 3, 3)
