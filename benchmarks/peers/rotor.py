"""Rotor: the optimal checkpointing of a chain, by dynamic programming over memory.

The step is read as a chain of stages: each repeated block with the ops up to the next one, what comes before
the first, and what comes after the last. The forward of stage l takes uf_l; a_l bytes go on to the next
stage, and abar_l bytes are kept if its backward is to follow without another forward.

    C(s, t, m), least time of forwards for the backward of stages s..t with m bytes, input of s held:
        C(s, s, m) = uf_s                                                     if abar_s <= m
        C(s, t, m) = min of
            uf_s + C(s+1, t, m - abar_s)                                      "keep all of s"
            Σ_{s <= k < r} uf_k + C(r, t, m - a_{r-1}) + C(s, r-1, m)         "keep the input of r", s < r

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, Optimal checkpointing for heterogeneous chains, 2019
(ACM TOMS 2024). What backward reads is cut into 400 slots. Transient bytes inside stages are left to the
evaluator: programs for many numbers of slots are made, and all are judged.

Where the model is no chain (an encoder's output that every decoder block reads), what crosses stages is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from benchmarks.step import Step
from remat.solvers import prune

SLOTS = 400
BUDGETS = 60
"""Numbers of slots that are tried."""


@dataclass(frozen=True)
class _Chain:
    """Stages; times in the problem's unit, bytes in slots."""

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    """Problem ops of the backward of each stage, in program order."""
    time: tuple[int, ...]
    """Of the forward of each stage."""
    output: tuple[int, ...]
    """Slots of what each stage hands on."""
    kept: tuple[int, ...]
    """Slots of what a stage keeps for its backward, its output with it."""


def rotor_chain(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Optimal programs for the chain, for numbers of slots from the least that suffices to all."""
    chain = _chain(step)
    last, most = len(chain.forward) - 1, sum(chain.kept)
    cost, choice = _tables(chain, most)
    least = next(m for m in range(most + 1) if np.isfinite(cost[0][last][m]))
    for m in sorted({least + (most - least) * i // BUDGETS for i in range(BUDGETS + 1)}):
        runs: list[int] = []
        _unroll(chain, choice, (0, last, m), step.border, runs)
        yield f"rotor {m / most:.2f}", prune(step.problem, runs)


def _chain(step: Step) -> _Chain:
    ops, sizes, n = step.problem.ops, step.problem.sizes, len(step.problem.ops)
    starts = [0, *(block[0] for block in step.blocks), max(step.blocks[-1]) + 1, step.border]
    forward = [tuple(range(a, b)) for a, b in pairwise(starts)]
    stage = {v: i for i, part in enumerate(forward) for v in part}
    writer = {s: v for v, op in enumerate(ops) for s in op.writes}
    cuts = [step.border + 1]  # where the backward of each stage begins, from the last stage on
    for block in step.backwards[::-1]:
        cuts.append(max(cuts[-1], min(block, default=cuts[-1])))
    cuts += [max(cuts[-1], max(step.backwards[0], default=n - 1) + 1), n]
    backward = [tuple(range(a, b)) for a, b in pairwise(cuts)][::-1]
    passed: list[set[int]] = [set() for _ in forward]
    kept: list[set[int]] = [set() for _ in forward]
    for v, op in enumerate(ops):
        for s in op.reads:
            w = writer[s]
            if w >= step.border:
                continue
            if v >= step.border:
                kept[stage[w]].add(s)
            elif stage[v] == stage[w] + 1:
                passed[stage[w]].add(s)
    total = sum(sizes[s] for part in kept for s in part)
    slot = max(1.0, total / SLOTS)

    def slots(part: set[int]) -> int:
        return int(np.ceil(sum(sizes[s] for s in part) / slot))

    return _Chain(
        tuple(forward),
        tuple(backward),
        tuple(sum(ops[v].cost for v in part) for part in forward),
        tuple(slots(part) for part in passed),
        tuple(slots(part | more) for part, more in zip(kept, passed, strict=True)),
    )


def _tables(
    chain: _Chain, most: int
) -> tuple[list[list[npt.NDArray[np.float64]]], list[list[list[int]]]]:
    """C up to `most` slots for every s <= t, and what attains it: 0 keeps all of s, r > s the input of r."""
    n = len(chain.forward)
    never = np.full(most + 1, np.inf)
    cost = [[never] * n for _ in range(n)]
    choice: list[list[list[int]]] = [[[0] * (most + 1) for _ in range(n)] for _ in range(n)]

    def less(table: npt.NDArray[np.float64], slots: int) -> npt.NDArray[np.float64]:
        return np.concatenate([never[:slots], table])[: most + 1]

    before = np.concatenate([[0.0], np.cumsum(chain.time)])
    for length in range(n):
        for s in range(n - length):
            t = s + length
            rest = cost[s + 1][t] if length else np.zeros(most + 1)
            options = [chain.time[s] + less(rest, chain.kept[s])]
            for r in range(s + 1, t + 1):
                again = before[r] - before[s]
                options.append(again + less(cost[r][t], chain.output[r - 1]) + cost[s][r - 1])
            stacked = np.stack(options)
            best = np.argmin(stacked, axis=0)
            cost[s][t] = np.min(stacked, axis=0)
            choice[s][t] = [s + int(k) if k else 0 for k in best]
    return cost, choice


def _unroll(
    chain: _Chain,
    choice: list[list[list[int]]],
    part: tuple[int, int, int],
    border: int,
    runs: list[int],
) -> None:
    """Write out the program for stages s..t with m slots."""
    s, t, m = part
    r = choice[s][t][m]
    if r:
        for k in range(s, r):
            runs.extend(chain.forward[k])
        _unroll(chain, choice, (r, t, m - chain.output[r - 1]), border, runs)
        _unroll(chain, choice, (s, r - 1, m), border, runs)
        return
    runs.extend(chain.forward[s])
    if s < t:
        _unroll(chain, choice, (s + 1, t, m - chain.kept[s]), border, runs)
    elif s == len(chain.forward) - 1:
        runs.append(border)
    runs.extend(chain.backward[s])
