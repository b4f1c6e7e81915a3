"""The commands plan and frontier: what to keep and what to recompute under a budget."""

import argparse
import dataclasses
import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from .cli_settings import add_settings, given_settings, save_report
from .cli_target import (
    MODEL,
    UsageError,
    add_command,
    add_target,
    dynamic_of,
    example_of,
    explaining,
    optimizer_of,
    width,
)

if TYPE_CHECKING:
    from .dropin import Remat
    from .views.step_report import Point

_POINT_S = 5.0
"""Solver time of a point of the frontier that goes with a report."""


def add_plan(commands: Any) -> None:
    """Add ``plan``."""
    parser = add_command(
        commands,
        "plan",
        "what to keep and what to recompute under a budget",
        "Find what to keep and what to recompute so that the peak of the whole step stays under a budget. "
        + MODEL,
        [
            "plan examples.models:gpt2_small --budget-gb 0.8 --report out/",
            "plan examples.models:llama3_8b --device cuda:H100-80GB --budget 80GB",
            "plan my_code:build --budget 80% --save '*.attn::*' --json",
        ],
    )
    add_target(parser)
    add_settings(
        parser,
        *(
            "budget_gb",
            "budget",
            "time_limit_s",
            "gap",
            "save",
            "recompute",
            "cache_dir",
            "report_dir",
        ),
    )
    parser.set_defaults(command=plan)


def add_frontier(commands: Any) -> None:
    """Add ``frontier``."""
    parser = add_command(
        commands,
        "frontier",
        "overhead against budget, from the least peak to eager's",
        "Plan at several budgets, from the least peak that was found to that of the step as it is. "
        + MODEL,
        ["frontier examples.models:gpt2_small --count 8", "frontier my_code:build --json"],
    )
    add_target(parser)
    add_settings(parser, "time_limit_s", "gap", "save", "recompute")
    parser.add_argument("--count", type=int, default=6, metavar="N", help="of budgets; default 6")
    parser.set_defaults(command=frontier)


def plan(arguments: argparse.Namespace) -> int:
    """Print a plan."""
    given = given_settings(arguments)
    if "budget_gb" not in given:
        raise UsageError("a budget is needed: --budget-gb 20, --budget 80%")
    from .plan_frontier import plan_frontier
    from .progress import progress
    from .views.text import to_text

    with redirect_stdout(sys.stderr):
        remat = _planned(arguments, given)
        planned = remat.planned
        assert planned is not None
        points: tuple[Point, ...] = ()
        if folder := given.get("report_dir"):
            with progress() as told:
                points = plan_frontier(planned, time_limit_s=_POINT_S, report=told)
        report = remat.report(points)
        if folder:
            save_report(report, folder)
    if arguments.json:
        figures = json.loads(planned.plan.to_json())
        del figures["steps"]  # the program
        named = {"schema": "remat.plan/1", "model": report.model}
        print(json.dumps(named | figures, indent=1))
    else:
        print(to_text(report, width()))
    return 0


def frontier(arguments: argparse.Namespace) -> int:
    """Print plans at several budgets."""
    given = given_settings(arguments)
    if arguments.count < 2:
        raise UsageError("--count must be at least 2")
    from .budget import in_units
    from .doctor import LARGE
    from .plan_frontier import plan_frontier
    from .progress import progress

    with redirect_stdout(sys.stderr):
        planned = _planned(arguments, {**given, "budget_gb": LARGE}).planned
        assert planned is not None
        with progress() as told:
            points = plan_frontier(planned, arguments.count, given.get("time_limit_s", 10.0), told)
    if arguments.json:
        data = {"schema": "remat.frontier/1", "points": list(map(dataclasses.asdict, points))}
        print(json.dumps(data, indent=1))
        return 0
    print(f"{'budget':>12}{'peak':>12}{'overhead':>11}{'no less than':>14}")
    for point in points:
        print(
            f"{in_units(point.budget_bytes):>12}{in_units(point.peak_bytes):>12}"
            f"{f'+{point.overhead:.2%}':>11}{f'+{point.lower_bound:.2%}':>14}"
        )
    return 0


def _planned(arguments: argparse.Namespace, given: dict[str, Any]) -> "Remat":
    """Plan what the command line names."""
    from remat.passes import StepProtocol

    from .optimize import optimize_checkpoints

    example = example_of(arguments)
    options = {
        name: value for name, value in given.items() if name not in ("budget_gb", "report_dir")
    }
    with explaining():
        model = optimize_checkpoints(
            example.model,
            given["budget_gb"],
            example.args,
            example.kwargs,
            loss_fn=example.loss_fn,
            optimizer=optimizer_of(arguments),
            protocol=StepProtocol(
                gradients_resident=arguments.accumulation_steps > 1,
                outputs_held=arguments.hold_outputs,
            ),
            cost_model=arguments.device or "roofline",
            dynamic=dynamic_of(arguments),
            on_failure="raise",
            **options,
        )
    remat: Remat = vars(model)["remat"]
    if remat.planned is None:
        raise UsageError("REMAT_DISABLE is set, so nothing is planned")
    return remat
