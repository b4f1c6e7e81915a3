"""The peers' programs are what they claim, and all are judged alike."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import chain, identity, problems, random_problem
from torch import Tensor, nn

from benchmarks import comparison, side_by_side
from benchmarks.comparison import EQUAL, PEERS, Point, choose_peaks
from benchmarks.peers import torch_budget
from benchmarks.peers.checkpoint import checkpoint_blocks, chen_sqrt
from benchmarks.peers.dtr import _Run
from benchmarks.peers.rotor import _Chain, _tables
from benchmarks.real_models import Case
from benchmarks.step import PROTOCOL, Step, capture_step, free, judge
from remat.ir import VerifyError
from remat.passes import emit_schedule, profile
from remat.solvers import Problem, evaluate

Programs = dict[str, dict[str, tuple[int, ...]]]


class Block(nn.Module):
    """A residual block whose inside is four times as wide as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).relu()), 0.1)


class Model(nn.Module):
    """Four blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


CASE = Case("small", "", r"blocks\.\d+", lambda: (Model(), {"x": torch.empty(512, 32)}))


@pytest.fixture(scope="module")
def step() -> Step:
    return capture_step(CASE, "a100-80gb")


@pytest.fixture(scope="module")
def programs(step: Step) -> Programs:
    """Programs of every peer, by its name and theirs."""
    with patch.object(torch_budget, "BUDGETS", (1.0, 0.5, 0.0)):
        return {name: dict(peer(step)) for name, peer in PEERS}


def test_blocks_are_found_in_both_passes(step: Step) -> None:
    assert len(step.blocks) == len(step.backwards) == 4
    assert max(step.blocks[-1]) < step.border < min(step.backwards[-1])
    assert max(step.backwards[-1]) < max(step.backwards[0])


def test_every_peer_has_programs_that_run_every_op(step: Step, programs: Programs) -> None:
    assert all(programs.values())
    for label, executions in (item for found in programs.values() for item in found.items()):
        found = judge(step.problem, executions)
        again = Counter(executions)
        cost = sum(step.problem.ops[v].cost * (count - 1) for v, count in again.items())
        assert len(again) == len(step.problem.ops), label
        assert found.cost == cost, label
        assert found.peak > step.problem.resident, label


def test_judging_in_another_order_follows_the_definition(step: Step) -> None:
    peak = evaluate(free(step.problem), step.program).peak
    assert judge(step.problem, step.program).peak == peak
    with pytest.raises(VerifyError):
        judge(step.problem, step.program[:-1])
    with pytest.raises(VerifyError):
        judge(step.problem, step.program[::-1])


@pytest.mark.parametrize("number", range(3))
def test_the_emitted_graph_has_the_peak_of_the_evaluator(step: Step, number: int) -> None:
    _, executions = next(islice(checkpoint_blocks(step), number, None))
    emitted = emit_schedule(step.prepared, step.index, executions, PROTOCOL)
    peak = profile(emitted.trace).peak
    assert peak == evaluate(step.problem, executions).peak
    assert peak <= judge(step.problem, executions).peak  # peers reuse nothing in place


def test_checkpointed_blocks_run_twice_and_keep_less(step: Step) -> None:
    none, every, second = (judge(step.problem, x) for _, x in checkpoint_blocks(step))
    (_, chen), *_ = chen_sqrt(step)
    assert none.cost == 0 < second.cost < every.cost
    assert every.peak < second.peak < none.peak
    forward = sum(step.problem.ops[v].cost for block in step.blocks for v in block)
    assert 0.5 * forward < every.cost <= forward
    assert judge(step.problem, chen).cost >= every.cost


def test_torch_saves_less_with_a_smaller_budget(step: Step, programs: Programs) -> None:
    found = {label: judge(step.problem, x) for label, x in programs["torch budget"].items()}
    assert "torch 1.00" in found
    assert "torch 0.00" in found
    least = min(found.values(), key=lambda x: x.peak)
    assert least.peak < judge(step.problem, step.program).peak
    assert found["torch 0.00"].cost == max(x.cost for x in found.values())


def test_rotor_is_optimal_on_a_uniform_chain() -> None:
    """n stages with enough memory run once; with the least, the k-th from the end runs k times."""
    n = 5
    chain = _Chain(((),) * n, ((),) * n, time=(1,) * n, output=(1,) * n, kept=(2,) * n)
    cost, _ = _tables(chain, 2 * n)
    assert cost[0][n - 1][2 * n] == n
    assert cost[0][n - 1][3] == n * (n + 1) / 2
    assert cost[0][n - 1][2] == float("inf")
    assert all(a >= b for a, b in zip(cost[0][n - 1], cost[0][n - 1][1:], strict=False))


def test_rotor_trades_time_for_memory(step: Step, programs: Programs) -> None:
    found = [judge(step.problem, x) for x in programs["rotor"].values()]
    assert found[-1].cost == 0
    assert found[0].peak < found[-1].peak
    assert found[0].cost > 0


def test_dtr_keeps_its_budget(step: Step, programs: Programs) -> None:
    peak = judge(step.problem, step.program).peak
    assert _Run(free(step.problem), 2 * peak).run() == step.program
    for label, executions in programs["DTR"].items():
        resident = step.problem.resident
        budget = resident + (peak - resident) * float(label.split()[-1])
        assert judge(step.problem, executions).peak <= budget + 1


@settings(max_examples=200, deadline=None)
@given(problems(9), st.floats(0.3, 1.0))
@example(
    random_problem(401, 9), 0.9375
)  # one of two results of an op is evicted, then made room for
def test_dtr_keeps_any_budget_on_any_problem(problem: Problem, fraction: float) -> None:
    seen = free(problem)
    if any(held >= 0 for held in seen.held):  # a held storage that is written again is there twice
        seen = replace(seen, held=(-1,) * len(seen.held))
    budget = int(evaluate(seen, identity(seen)).peak * fraction)
    found = _Run(seen, budget).run()
    if found:
        assert evaluate(seen, found).peak <= budget


@settings(max_examples=100, deadline=None)
@given(problems(9), st.randoms())
def test_another_order_is_judged_as_its_own_program(problem: Problem, rng: Random) -> None:
    """Swapping two neighbours that do not read each other swaps their bytes' places only."""
    program = list(identity(problem))
    straight = judge(problem, program)
    assert straight.peak == evaluate(free(problem), program).peak
    v = rng.randrange(len(program) - 1)
    first, second = problem.ops[v], problem.ops[v + 1]
    if set(first.writes) & set(second.reads) or v in problem.held or v + 1 in problem.held:
        return
    program[v], program[v + 1] = v + 1, v
    swapped = judge(problem, program)
    assert swapped.bytes[:v] == straight.bytes[:v]
    assert swapped.bytes[v + 2 :] == straight.bytes[v + 2 :]
    assert swapped.cost == 0


def test_checkmate_needs_no_more_time_than_any_peer_within_its_budget(
    step: Step, programs: Programs
) -> None:
    resident = step.problem.resident
    peak = judge(step.problem, step.program).peak
    solved = programs["Checkmate MILP"]
    rest = [found for name, found in programs.items() if name != "Checkmate MILP"]
    others = [judge(step.problem, x) for found in rest for x in found.values()]
    for label, executions in solved.items():
        budget = resident + (peak - resident) * float(label.split()[-1])
        within = [x.cost for x in others if x.peak <= budget]
        assert within
        assert judge(step.problem, executions).cost <= min(within)


def test_the_chosen_peaks_hold_the_least_of_every_peer() -> None:
    points = [
        Point(peer, "", peak, overhead, 0.0, ())
        for peer, peak, overhead in [
            ("a", 1000, 0.0),
            ("a", 700, 0.2),
            ("b", 900, 0.1),
            ("b", 500, 0.4),
            ("b", 800, 0.3),
        ]
    ]
    chosen = [point.peak for point in choose_peaks(points, 2)]
    assert chosen == sorted(chosen, reverse=True)
    assert {700, 500} <= set(chosen)
    assert 1000 not in chosen


def test_the_command_prints_one_table_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.jsonl"
    page.write_text("above\n" + "\nold\n".join(side_by_side.MARKS) + "\nbelow\n")
    monkeypatch.setattr(side_by_side, "DOCS", page)
    monkeypatch.setattr(side_by_side, "CASES", (CASE,))
    monkeypatch.setattr(comparison, "PEERS", PEERS[:3])
    options = ["--models", "small", "--time-limit", "5", "--json", str(figures), "--write-docs"]
    monkeypatch.setattr("sys.argv", ["side_by_side", *options])
    assert side_by_side.main() == 0
    printed, written = capsys.readouterr().out, page.read_text()
    assert "### small" in printed
    assert "### small" in written
    assert "old" not in written
    assert written.startswith("above\n")
    assert written.endswith("below\n")
    records = [json.loads(line) for line in figures.read_text().splitlines()]
    rows = [record for record in records if record["kind"] == "row"]
    assert rows
    for row in rows:
        assert row["bound"] <= row["overhead"] <= row["peer_overhead"] + EQUAL
    assert {record["peer"] for record in records if record["kind"] == "peer"} == {
        name for name, _ in PEERS[:3]
    }


def _node_link(problem: Problem) -> str:
    """A problem with a storage for each op, as the JSON that traced graphs are published in."""
    nodes = [
        {"id": v, "name": f"op{v}", "cost_ram": problem.sizes[v], "cost_cpu": op.cost}
        for v, op in enumerate(problem.ops)
    ]
    links = [{"source": s, "target": v} for v, op in enumerate(problem.ops) for s in op.reads]
    return json.dumps({"graph": {"keep_order": True}, "nodes": nodes, "links": links})


def test_a_folder_of_graphs_is_solved_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "chain.json").write_text(_node_link(chain(6)))
    (tmp_path / "other.json").write_text('{"not": "a graph"}')
    command = [sys.executable, "-m", "benchmarks.graphs", str(tmp_path), "--fractions", "1,.7,.1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "other.json is passed over" in ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["fraction"] for line in lines] == [1, 0.7, 0.1]
    assert [line["status"] for line in lines] == ["optimal", "optimal", "infeasible"]
    # 12 ops of time 1; the peak is 7 bytes: two bytes less are two repetitions.
    assert [line["overhead_percent"] for line in lines] == [0, round(100 * 2 / 12, 4), None]
    assert [line["bound_percent"] for line in lines] == [0, round(100 * 2 / 12, 4), None]
    assert [(line["peak"], line["budget"]) for line in lines] == [(7, 7), (5, 5), (None, 1)]
    assert {(line["graph"], line["n"], line["m"]) for line in lines} == {("chain", 12, 16)}


def test_a_folder_without_graphs_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.graphs", str(tmp_path / "absent")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "has no *.json graphs" in ran.stderr
