"""The commands that look at a model: analyze, plan, frontier."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_target import (
    MODEL,
    UsageError,
    add_command,
    add_target,
    dynamic_of,
    example_of,
    explaining,
    optimizer_of,
    settings,
    width,
)

if TYPE_CHECKING:
    from remat.passes import Plan

    from .dropin import Remat
    from .report import MemoryReport
    from .views.step_report import Point


def add_analyze(commands: Any) -> None:
    """Add ``analyze``."""
    parser = add_command(
        commands,
        "analyze",
        "how much memory a training step takes, when, and for what",
        "The memory of a training step as it runs today: by phase, by what holds it, as formulas. "
        + MODEL,
        [
            "analyze examples.models:gpt2_small --dynamic input_ids=batch,seq",
            "analyze examples.models:llama3_8b --device cuda:A100-80GB --budget-gb 80",
            "analyze config.json --input input_ids=1x512:int64 --input labels=1x512:int64 --report out/",
        ],
    )
    add_target(parser)
    _add_settings(parser, "budget_gb", "budget", "report_dir")
    parser.add_argument(
        "--at", default="", metavar="NAME=N,...", help="sizes other than the example's"
    )
    parser.add_argument(
        "--largest", metavar="NAME", help="the largest value of a size that fits the budget"
    )
    parser.set_defaults(command=analyze)


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
    _add_settings(
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
    _add_settings(parser, "time_limit_s", "gap", "save", "recompute")
    parser.add_argument("--count", type=int, default=6, metavar="N", help="of budgets; default 6")
    parser.set_defaults(command=frontier)


def analyze(arguments: argparse.Namespace) -> int:
    """Print what a step takes."""
    sizes, given = _sizes(arguments.at), _given(arguments)
    budget: Any = given.get("budget_gb")
    name = arguments.largest
    if name and budget is None:
        raise UsageError("--largest needs --budget-gb")
    with redirect_stdout(sys.stderr):  # whatever the user's code prints
        report = _analyzed(arguments)
        report.binding(
            {**sizes, **({name: 1} if name else {})}
        )  # say now if there is no such size
        if folder := given.get("report_dir"):
            _save(report.step_report(step="steady", **sizes), folder)
        largest = report.largest(name, budget, checkpointing=False, **sizes) if name else None
        diagnosis = report.diagnosis(budget, **sizes) if budget is not None else None
    if arguments.json:
        data = json.loads(report.to_json(**sizes))
        asked = {"largest": largest and {name: largest}, "diagnosis": diagnosis}
        print(json.dumps(data | {k: v for k, v in asked.items() if v is not None}, indent=1))
        return 0
    print(_analysis_text(report, sizes))
    if diagnosis:
        print(f"\n{diagnosis}")
    if name:
        print(f"\nlargest {name} that fits {budget}: {largest}")
    return 0


def _analyzed(arguments: argparse.Namespace) -> "MemoryReport":
    from .analysis import analyze as analyzed

    example = example_of(arguments)
    with explaining():
        return analyzed(
            example.model,
            example.args,
            example.kwargs,
            loss_fn=example.loss_fn,
            optimizer=optimizer_of(arguments),
            dynamic=dynamic_of(arguments),
            device=arguments.device,
            accumulation_steps=arguments.accumulation_steps,
            outputs_held=arguments.hold_outputs,
        )


def _analysis_text(report: "MemoryReport", sizes: dict[str, int]) -> str:
    from .views.text import to_text

    text = (
        str(report) if not sizes else to_text(report.step_report(step="steady", **sizes), width())
    )
    return f"{text}\n\n{report.formulas()}" if report.sizes else text


def plan(arguments: argparse.Namespace) -> int:
    """Print a plan."""
    given = _given(arguments)
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
            _save(report, folder)
    if arguments.json:
        named = {"schema": "remat.plan/1", "model": report.model}
        print(json.dumps(named | _plan_as_json(planned.plan), indent=1))
    else:
        print(to_text(report, width()))
    return 0


_POINT_S = 5.0
"""Solver time of a point of the frontier that goes with a report."""


def frontier(arguments: argparse.Namespace) -> int:
    """Print plans at several budgets."""
    given = _given(arguments)
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


def _plan_as_json(plan: "Plan") -> Any:
    """The figures and decisions of a plan, as JSON takes them; its program is left out."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name != "steps"}
    return json.loads(json.dumps(fields, default=_plain))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


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


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command takes, from the command line and where else they are set."""
    from .settings import SettingError, load

    names = arguments.settings
    given = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        found = load(given, Path.cwd()).values
        if folder := found.get("report_dir"):  # now, not after minutes of planning
            Path(folder).mkdir(parents=True, exist_ok=True)
    except SettingError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--report {folder}: {error.strerror}") from error
    return {name: value for name, value in found.items() if name in names}


def _sizes(text: str) -> dict[str, int]:
    """Sizes such as ``batch=8,seq=512``."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if not number.isdigit():
            raise UsageError(f"--at {text}: it should be like batch=8,seq=512")
        found[name.strip()] = int(number)
    return found


def _save(report: Any, folder: str) -> None:
    """Write a report in all formats, and say where."""
    from .views.save import save_all

    written = save_all(report, Path(folder), report.timeline.program)
    print(
        f"remat: wrote {len(written)} files to {folder}: " + ", ".join(p.name for p in written),
        file=sys.stderr,
    )


def _add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that can also be set in the environment and in pyproject.toml."""
    for setting in settings(*names):
        flags = [setting.flag, *(["--report"] if setting.name == "report_dir" else [])]
        parser.add_argument(
            *flags,
            dest=setting.name,
            metavar=setting.metavar,
            help=setting.help,
            default=argparse.SUPPRESS,
        )
    parser.set_defaults(settings=names)
