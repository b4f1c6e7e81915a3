import random

from hypothesis import given
from hypothesis import strategies as st
from problems import random_problem

from remat.solvers import evaluate
from remat.solvers.timeline import Timeline


@given(st.integers(0, 2**32))
def test_the_bytes_stay_those_of_the_evaluator(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(seed, 9)
    line = Timeline(problem, range(len(problem.ops)))
    for _ in range(8):
        repeated = [x for x in line.order if not x.first]
        position = rng.randint(1, len(line.order) - 1)
        done = max(x.op for x in line.order[:position]) + 1
        candidates = [v for v in range(done) if problem.ops[v].candidate]
        if repeated and rng.random() < 0.4:
            line.remove(rng.choice(repeated))
        elif candidates:
            line.insert(sorted(rng.sample(candidates, min(len(candidates), 2))), position)
        assert tuple(line.bytes()) == evaluate(problem, line.schedule()).bytes
        assert [line.bytes_at(x) for x in line.order] == line.bytes()
        assert Timeline(problem, line.schedule()).bytes() == line.bytes()
        assert [x.at for x in line.order] == list(range(len(line.order)))
