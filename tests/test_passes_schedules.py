"""Any legal schedule: what the evaluator says of the problem is what liveness says of the program."""

from collections.abc import Callable, Sequence
from typing import Any

import zoo
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from modules import builders

from remat.ir import OutputKind, verify
from remat.passes import (
    Prepared,
    StepProtocol,
    emit_schedule,
    formulate,
    joined,
    planned_trace,
    prepare_step,
    profile,
    resident_bytes,
    split_joint,
    state_bytes,
)
from remat.solvers import Problem, evaluate, prune

SLOW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # a smaller example would take minutes to find
    suppress_health_check=[HealthCheck.too_slow],  # capture takes some tenths of a second
)


def prepared_step(case: zoo.Case) -> Prepared:
    return prepare_step(case.model, case.args, case.kwargs)


def problem_of(prepared: Prepared, protocol: StepProtocol) -> tuple[Problem, Any]:
    return formulate(
        prepared.graph,
        [1] * len(prepared.graph.ops),
        protocol,
        resident=sum(resident_bytes(prepared.graph).values()),
        budget=0,
        state_bytes=state_bytes("cpu"),
    )


def with_repetitions(problem: Problem, where: Sequence[float], which: Sequence[float]) -> Any:
    """A legal schedule: every op once in order, and here and there one that may be repeated."""
    schedule = list(range(len(problem.ops)))
    for place, choice in zip(where, which, strict=True):
        position = int(place * len(schedule))
        known = sorted(set(schedule[:position]))
        candidates = [v for v in known if problem.ops[v].candidate]
        if candidates:
            schedule.insert(position, candidates[int(choice * len(candidates))])
    return prune(problem, tuple(schedule))


FRACTIONS = st.lists(st.floats(0, 1, exclude_max=True), min_size=40, max_size=40)
PROTOCOLS = st.builds(StepProtocol, gradients_resident=st.booleans(), outputs_held=st.booleans())


@SLOW
@given(builders(3), FRACTIONS, FRACTIONS, PROTOCOLS)
def test_the_evaluator_and_the_rewritten_program_agree_to_the_byte(
    build: Callable[[], zoo.Case],
    where: list[float],
    which: list[float],
    protocol: StepProtocol,
) -> None:
    prepared = prepared_step(build())
    problem, index = problem_of(prepared, protocol)
    schedule = with_repetitions(problem, where, which)
    emitted = emit_schedule(prepared, index, schedule, protocol)
    verify(emitted.graph)
    assert profile(planned_trace(emitted.graph, emitted.ranges)).peak == (
        evaluate(problem, schedule).peak
    )
    assert emitted.steps == tuple(prepared.graph.ops[index.ops[v]].name for v in schedule)


@SLOW
@given(builders(3), FRACTIONS, FRACTIONS)
def test_stages_take_over_everything_and_keep_nothing_too_long(
    build: Callable[[], zoo.Case], where: list[float], which: list[float]
) -> None:
    prepared = prepared_step(build())
    problem, index = problem_of(prepared, StepProtocol())
    schedule = with_repetitions(problem, where, which)
    emitted = emit_schedule(prepared, index, schedule, StepProtocol())
    parts = split_joint(emitted.rewritten, prepared.signature)
    known = {*parts.primals, *parts.tangents, *parts.saved}
    alive = {*parts.saved, *parts.tangents}
    for stage in parts.stages:
        assert set(stage.inputs) <= known
        dropped = {n for n, gone in zip(stage.inputs, stage.dropped, strict=True) if gone}
        alive = (alive | set(stage.kept)) - dropped
        known = (known | set(stage.kept)) - (dropped - set(parts.primals))
    assert alive <= set(parts.tangents)  # one that nothing reads
    delivered = [target for stage in parts.stages for target in stage.gradients]
    gradients = [t for kind, t in prepared.signature.outputs if kind is OutputKind.GRADIENT and t]
    assert sorted(delivered) == sorted(gradients)
    run = [node for stage in parts.stages for node in stage.module.graph.nodes]
    names = [node.name for node in run if node.op == "call_function"]
    whole = [n.name for n in joined(parts).graph.nodes if n.op == "call_function"]
    assert names == whole
