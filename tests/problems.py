"""Random and named problems that every solver's tests share."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from remat.solvers import Op, Problem, evaluate


def identity(problem: Problem) -> tuple[int, ...]:
    """The schedule that executes every op once."""
    return tuple(range(len(problem.ops)))


def with_fraction(problem: Problem, fraction: float) -> Problem:
    """The problem with a fraction of its own peak as the budget."""
    return replace(problem, budget=int(evaluate(problem, identity(problem)).peak * fraction))


def random_problem(seed: int, most_ops: int) -> Problem:
    """A problem with every feature: several outputs, holds, states, scratch, no candidates, zeros, absences,
    reuse.

    The budget lies between what a single op needs and the peak of the program, where the choices are.
    """
    rng = random.Random(seed)
    n = rng.randint(3, most_ops)
    ops: list[Op] = []
    sizes: list[int] = []
    held: list[int] = []
    readable: list[int] = []

    def storage(hold: int) -> int:
        sizes.append(rng.choice([0, *range(1, 10)]))
        held.append(hold)
        return len(sizes) - 1

    for v in range(n):
        count = min(len(readable), rng.choice([1, 1, 2, 2, 3]))
        reads = rng.sample(readable, count)
        writes: list[int] = []
        for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 2, 2])):
            writes.append(storage(rng.choice([-1] * 9 + [rng.randint(v, n)])))
        ops.append(
            Op(
                cost=rng.choice([0, *range(1, 10)]),
                reads=tuple(sorted(reads)),
                writes=tuple(writes),
                scratch=rng.choice([0, 0, 0, 2]),
                candidate=rng.random() < 0.85,
                state=storage(-1) if rng.random() < 0.15 else None,
                repeat_scratch=rng.choice([0, 0, 0, 1]),
            )
        )
        readable += writes
        if rng.random() < 0.4:
            pairs = tuple(zip(reads, writes, strict=False))[: rng.choice([1, 1, 2])]
            for a, b in pairs:
                sizes[b] = sizes[a]
            ops[v] = replace(ops[v], reuse=pairs)
    problem = Problem(tuple(ops), tuple(sizes), tuple(held), rng.randint(0, 3), 0)
    peak = evaluate(problem, identity(problem)).peak
    least = max(
        problem.resident + op.scratch + sum(sizes[s] for s in (*op.reads, *op.writes))
        for op in ops
    )
    problem = replace(problem, budget=rng.randint(min(least, peak), peak))
    border = rng.randrange(n)
    written = [
        s for op in ops[:border] for s in op.writes if sizes[s] and s not in ops[border].reads
    ]
    if rng.random() < 0.3 and written:
        ops[border] = replace(ops[border], absent=(rng.choice(written),))
    return replace(problem, ops=tuple(ops))


def problems(most_ops: int = 7) -> st.SearchStrategy[Problem]:
    """Random problems; a seed each, because drawing every field gives mostly trivial ones."""
    return st.integers(0, 2**32).map(lambda seed: random_problem(seed, most_ops))


def chain(length: int, size: int = 1, cost: int = 1) -> Problem:
    """A forward chain of `length` ops and its backward: b_i reads what f_i and b_{i+1} wrote.

    Every storage has the same size, so the least peak and the cheapest schedules can be counted by hand.
    """
    ops = [Op(cost, (i - 1,) if i else (), (i,)) for i in range(length)]
    for i in reversed(range(length)):
        written = len(ops)
        reads = (i,) if i == length - 1 else (i, written - 1)
        ops.append(Op(cost, reads, (written,)))
    sizes = (size,) * len(ops)
    return Problem(tuple(ops), sizes, (-1,) * len(ops), resident=0, budget=0)
