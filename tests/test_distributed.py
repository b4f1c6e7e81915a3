"""DDP and FSDP2: two real processes over gloo, and the orders that are refused."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from remat import UnsupportedGraphError, optimize_checkpoints

RANKS = Path(__file__).with_name("ranks.py")
QUICK = (
    "ddp_plain",
    "ddp_no_sync",
    "ddp_other_shapes",
    "ddp_one_falls_back",
    "ddp_short_batch",
    "ddp_overlap",
    "ddp_memory",
    "solver_fails_on_one",
    "refused_ddp",
    "refused_inside",
    "fsdp_blocks",
    "fsdp_refused",
)
SLOW = (
    "ddp_views",
    "ddp_unused",
    "ddp_static",
    "ddp_one_replans",
    "ddp_memory_views",
    "fsdp_root",
    "docs",  # at last: torch keeps sharded models alive, and plans would count them
)


@functools.cache
def results(scenarios: tuple[str, ...]) -> dict[str, list[Any]] | str:
    """What both ranks found, by scenario, or the error; a hang is one."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = subprocess.Popen(
            [*launch, "--nproc-per-node", "2", str(RANKS), *scenarios],
            env=os.environ | {"OMP_NUM_THREADS": "1", "RESULTS": str(found)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = ranks.communicate(timeout=300)
        except subprocess.TimeoutExpired as error:
            ranks.terminate()  # torchrun ends its workers, too
            ranks.communicate(timeout=60)
            return str(error)
        if ranks.returncode:
            return errors[-6000:]
        read: dict[str, list[Any]] = json.loads(found.read_text())
    return read


def of(scenario: str) -> list[Any]:
    """What both ranks found in one scenario."""
    found = results(QUICK if scenario in QUICK else SLOW)
    assert isinstance(found, dict), found
    return found[scenario]


VARIANTS = [
    "ddp_plain",
    "ddp_no_sync",
    pytest.param("ddp_unused", marks=pytest.mark.slow),
    pytest.param("ddp_static", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("scenario", VARIANTS)
def test_ddp_gives_the_losses_gradients_and_parameters_of_plain_ddp(scenario: str) -> None:
    for rank in of(scenario):
        assert rank["equal"]
        assert rank["planned"] == 4
        assert rank["fallbacks"] == {}
        assert rank["repeats"] > 0


@pytest.mark.parametrize("scenario", VARIANTS)
def test_one_rank_solves_and_all_run_its_plan(scenario: str) -> None:
    first, second = of(scenario)
    assert first["steps"] == second["steps"]
    assert first["searches"] + second["searches"] == first["plans"] == second["plans"]
    assert (first["gap"], first["status"]) == (second["gap"], second["status"])


def test_a_rank_with_other_shapes_runs_the_same_plan_and_claims_no_proof() -> None:
    first, second = of("ddp_other_shapes")
    assert first["equal"]
    assert second["equal"]
    assert first["steps"] == second["steps"]
    assert (first["searches"], second["searches"]) == (1, 0)
    assert (first["status"], second["status"]) == ("optimal", "feasible")


def test_a_rank_that_falls_back_alone_trains_on() -> None:
    first, second = of("ddp_one_falls_back")
    assert first["equal"]
    assert second["equal"]
    assert (first["planned"], second["planned"]) == (4, 3)
    why = "other arguments, or other values of arguments that are no tensors"
    assert second["fallbacks"] == {why: 1}


def test_a_rank_with_a_short_last_batch_plans_for_it_alone() -> None:
    first, second = of("ddp_short_batch")
    assert first["equal"]
    assert second["equal"]
    assert (first["planned"], second["planned"]) == (4, 4)
    assert (first["plans"], second["plans"]) == (1, 2)


@pytest.mark.slow
def test_a_rank_that_plans_alone_trains_on() -> None:
    first, second = of("ddp_one_replans")
    assert first["equal"]
    assert second["equal"]
    assert (first["plans"], second["plans"]) == (1, 2)


def test_an_error_on_the_rank_that_solves_does_not_hold_up_the_others() -> None:
    first, second = of("solver_fails_on_one")
    assert first["error"] == "broken"
    assert second["error"] == ""
    assert second["steps"]


def test_buckets_are_reduced_while_backward_is_going_on() -> None:
    for rank in of("ddp_overlap"):
        assert rank["buckets"] >= 3
        assert 2 <= rank["before the last stage"] < rank["buckets"]


@pytest.mark.parametrize(
    "scenario", ["ddp_memory", pytest.param("ddp_memory_views", marks=pytest.mark.slow)]
)
def test_the_peak_counts_the_buckets_and_is_the_measured_one(scenario: str) -> None:
    for rank in of(scenario):
        assert rank["repeats"] > 0
        assert rank["measured"] == rank["peak"] <= rank["budget"]
        assert rank["resident"] == 2 * rank["parameters"] + rank["x"]


def test_blocks_that_are_optimised_then_sharded_train_like_sharded_blocks() -> None:
    for rank in of("fsdp_blocks"):
        assert rank["equal"]
        assert [block["planned"] for block in rank["blocks"]] == [3, 3]
        assert [block["fallbacks"] for block in rank["blocks"]] == [{}, {}]
        assert all(block["repeats"] for block in rank["blocks"])


@pytest.mark.slow
def test_a_model_that_is_optimised_then_sharded_as_one_trains_like_a_sharded_one() -> None:
    for rank in of("fsdp_root"):
        assert rank["equal"]
        assert (rank["planned"], rank["fallbacks"]) == (3, {})
        assert rank["repeats"] > 0


@pytest.mark.slow
def test_the_snippets_of_the_page_run() -> None:
    assert of("docs") == [4, 4]


def test_wrapping_in_ddp_first_is_refused() -> None:
    for rank in of("refused_ddp"):
        assert "the model is wrapped by DistributedDataParallel already" in rank
        assert "DistributedDataParallel(optimize_checkpoints(model, budget))" in rank
    for rank in of("refused_inside"):
        assert rank.startswith("UnsupportedGraphError: 0 is wrapped by DistributedDataParallel")


@pytest.mark.parametrize(
    ("order", "what"),
    [
        ("after", "blocks is wrapped|the model is wrapped by FSDPModule already"),
        ("blocks, lazy", "is a DTensor"),
        ("blocks", "is a DTensor"),
        ("parameters", "blocks.0.up.weight is a DTensor"),
    ],
)
def test_sharding_under_a_plan_is_refused_with_the_order_that_works(order: str, what: str) -> None:
    for rank in of("fsdp_refused"):
        message = rank[order]
        assert message.startswith("UnsupportedGraphError")
        assert any(part in message for part in what.split("|"))
        assert "model.layers[i] = optimize_checkpoints(model.layers[i], budget)" in message


class _Elsewhere(nn.Module):
    """A stand-in by name: the library is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def wrapper(package: str, name: str) -> nn.Module:
    kind: Any = type(name, (_Elsewhere,), {"__module__": package})
    made: nn.Module = kind()
    return made


@pytest.mark.parametrize(
    ("model", "way"),
    [
        (nn.DataParallel(nn.Linear(2, 2)), "one process for each device"),
        (wrapper("deepspeed.runtime.engine", "DeepSpeedEngine"), "deepspeed.initialize"),
        (wrapper("torch.distributed.fsdp", "FullyShardedDataParallel"), "Use `fully_shard`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_wrappers_are_refused_with_what_to_do(model: nn.Module, way: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=way):
        optimize_checkpoints(model, 1)


def test_a_class_of_the_user_by_such_a_name_is_not_refused() -> None:
    optimize_checkpoints(wrapper("my_project", "DeepSpeedEngine"), 1)
