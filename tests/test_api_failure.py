"""What cannot be planned trains on in eager, with one warning that says why; never counted as planned."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_api_errors import Branch, Counts, Grows, Masked, Plain, Recurrent, Remembers, X, state
from torch import Tensor, nn
from twins import LOOSE, Step, least, make, record, same

from remat import (
    InfeasibleBudgetError,
    PatternError,
    StepProtocol,
    UnsupportedGraphError,
    optimize_checkpoints,
)
from remat.planner import make_plan

STEP = Step((X,))


def lazily(build: Callable[[], nn.Module], **options: Any) -> Any:
    return optimize_checkpoints(make(build), 1, **{**LOOSE, "time_limit_s": 2.0, **options})


class Routed(Plain):
    """Each expert takes as many rows as the router sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        chosen = self.router(hidden).argmax(1)
        out = torch.zeros_like(hidden)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(hidden[rows]))
        return out.tanh()


class Aliases(Plain):
    """One output is a view of the other, and both are trained."""

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return hidden, hidden[:4]


class Filled(Plain):
    """Fills a cache that the caller has made, as models of `transformers` do."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Any:
        cache = [] if cache is None else cache
        cache.append(super().forward(x))
        return torch.cat(cache).sin()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (Branch, r"test_api_errors\.py:\d+: if hidden\.sum\(\) > 0"),
        (Masked, r"depends on data|x\[:, 0\] > 0"),
        (Remembers, "changes attribute last"),
        (Counts, "changes attribute calls"),
        (Grows, "replaces the buffer seen"),
        (lambda: Recurrent(nn.LSTM), "rnn is an nn.LSTM"),
        (Routed, r"test_api_failure\.py:\d+|depends on data"),
        (Aliases, "shares memory with another output"),
    ],
)
def test_the_original_trains_as_before_with_one_warning_of_the_reason(
    build: Any, match: str
) -> None:
    def loss(output: Any) -> Tensor:
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first.pow(2).sum()

    step = Step((X,), loss=loss)
    model = lazily(build)
    with pytest.warns(UserWarning, match="no plan could be made") as caught:
        seen = record(model, step, 3)
    (warning,) = caught
    assert re.search(match, str(warning.message))
    assert Path(warning.filename).name == "twins.py"  # the line that calls the model
    assert same(seen, record(make(build), step, 3))
    stats = model.remat.stats
    assert (stats.planned, stats.plans) == (0, 0)
    assert stats.failed in str(warning.message)
    assert sum(stats.fallbacks.values()) == 3
    assert model.remat.explain().startswith("No plan, the original model trains: ")


def test_a_cache_that_the_caller_gives_is_filled_as_in_eager() -> None:
    model, eager = lazily(Filled), make(Filled)
    caches: list[list[Tensor]] = [[], []]

    def fill(each: nn.Module, cache: list[Tensor]) -> None:
        torch.manual_seed(1)
        for _ in range(2):
            each(X, cache)

    with pytest.warns(UserWarning, match="changes an argument, a list"):
        fill(model, caches[0])
    fill(eager, caches[1])
    assert same(*caches)
    assert len(caches[0]) == 2
    assert model.remat.stats.planned == 0


def test_raise_makes_it_an_error_and_changes_nothing() -> None:
    model = lazily(Branch, on_failure="raise")
    before = state(model)
    for _ in range(2):
        with pytest.raises(UnsupportedGraphError, match=r"if hidden\.sum"):
            model(X)
    assert same(state(model), before)
    assert model.remat.stats.failed == ""


def test_an_example_raises_by_default_and_warns_on_demand() -> None:
    with pytest.raises(UnsupportedGraphError):
        optimize_checkpoints(make(Branch), 1, (X,))
    with pytest.warns(UserWarning, match="no plan could be made") as caught:
        model: Any = optimize_checkpoints(make(Branch), 1, (X,), on_failure="warn")
    assert [Path(warning.filename).name for warning in caught] == ["test_api_failure.py"]
    assert same(record(model, STEP), record(make(Branch), STEP))
    assert sum(model.remat.stats.fallbacks.values()) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget_gb": "1kB"}, InfeasibleBudgetError),
        ({"budget_gb": 1, "save": ("no.such.module",)}, PatternError),
    ],
)
def test_what_asks_for_the_impossible_raises_in_any_case(
    options: dict[str, Any], error: type[Exception]
) -> None:
    model: Any = optimize_checkpoints(make(Plain), **options, on_failure="warn", **LOOSE)
    with pytest.raises(error):
        model(X)
    assert model.remat.stats.failed == ""


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="on_failure is 'warn', 'raise' or None"):
        optimize_checkpoints(make(Plain), 1, on_failure="ignore")


def test_a_call_that_eager_refuses_too_raises_as_in_eager_and_the_next_one_is_planned() -> None:
    model = lazily(Plain)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(X[:, :3])
    assert model.remat.stats.failed == ""
    assert same(record(model, STEP), record(make(Plain), STEP))
    assert model.remat.stats.planned == 2


def test_a_defect_in_planning_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("remat.making.plan_together", fail)
    model = lazily(Plain)
    with pytest.warns(UserWarning, match="ZeroDivisionError: division by zero"):
        seen = record(model, STEP)
    assert same(seen, record(make(Plain), STEP))
    monkeypatch.undo()
    model.remat.enable()  # tries again
    model(X)
    assert (model.remat.stats.planned, model.remat.stats.failed) == (1, "")


def test_a_new_size_that_cannot_be_planned_falls_back_and_the_others_stay_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lazily(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), dynamic={"input": {0: "n"}})
    model(X)
    monkeypatch.setattr("remat.making.plan_together", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="no plan could be made"):
        model(X[:1])  # a size of one has a plan of its own
    with pytest.warns(UserWarning, match="ran the original forward"):
        model(X[:1])
    model(X)
    stats = model.remat.stats
    assert (stats.planned, sum(stats.fallbacks.values()), stats.failed) == (2, 2, "")


@pytest.mark.parametrize("part", ["capture", "least peak", "rewrite"])
def test_an_interrupt_while_planning_passes_through_and_the_next_call_plans(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(request: Any, report: Any, prepared: Any, *_: Any) -> Any:
        def stop(now: str) -> None:
            if now == part:
                raise KeyboardInterrupt

        return make_plan(request, stop, prepared)

    budget = least(make(Plain), STEP, protocol=StepProtocol(gradients_resident=True))
    model: Any = optimize_checkpoints(make(Plain), f"{budget}B", **LOOSE)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state(model)
    monkeypatch.setattr("remat.making.plan_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert same(state(model), before)
    assert model.remat.stats.failed == ""
    monkeypatch.undo()
    model.zero_grad()
    assert same(record(model, STEP), record(make(Plain), STEP))
    assert model.remat.stats.planned == 2


class Interrupts(Plain):
    """Ctrl-C in the middle of the user's forward, while it is traced."""

    pressed = False

    def forward(self, x: Tensor) -> Any:
        hidden = self.lin(x)
        if type(hidden) is not Tensor and not Interrupts.pressed:
            Interrupts.pressed = True
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupt_in_the_traced_forward_leaves_everything_as_it_was() -> None:
    model = lazily(Interrupts)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert same(state(model), before)
    assert all(type(t) in (nn.Parameter, Tensor) for t in (*model.parameters(), *model.buffers()))
    assert same(record(model, STEP), record(make(Interrupts), STEP))
    assert model.remat.stats.planned == 2


SCRIPT = """
import signal, sys, threading, time, os
sys.path.insert(0, sys.argv[1])
import torch
from test_api_failure import Plain, make, state, same, X
from remat import optimize_checkpoints
model = optimize_checkpoints(torch.nn.Sequential(*(make(Plain) for _ in range(12))), 1)
before = state(model)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    model(X)
except KeyboardInterrupt:
    print("interrupted", same(state(model), before), model.remat.stats.plans)
model.remat.disable()
print(model(X).requires_grad)
"""


@pytest.mark.slow
def test_a_real_interrupt_of_a_real_process() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["interrupted True 0", "True"]
