"""The command analyze: what a training step takes as it runs today."""

import argparse
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
    from .report import MemoryReport


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
    add_settings(parser, "budget_gb", "budget", "report_dir")
    parser.add_argument(
        "--at", default="", metavar="NAME=N,...", help="sizes other than the example's"
    )
    parser.add_argument(
        "--largest", metavar="NAME", help="the largest value of a size that fits the budget"
    )
    parser.set_defaults(command=analyze)


def analyze(arguments: argparse.Namespace) -> int:
    """Print what a step takes."""
    sizes, given = _sizes(arguments.at), given_settings(arguments)
    budget: Any = given.get("budget_gb")
    name = arguments.largest
    if name and budget is None:
        raise UsageError("--largest needs --budget-gb")
    with redirect_stdout(sys.stderr):  # whatever the user's code prints
        report = _analyzed(arguments)
        report.binding(sizes | ({name: 1} if name else {}))  # say now if there is no such size
        if folder := given.get("report_dir"):
            save_report(report.step_report(step="steady", **sizes), folder)
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


def _sizes(text: str) -> dict[str, int]:
    """Sizes such as ``batch=8,seq=512``."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if not number.isdigit():
            raise UsageError(f"--at {text}: it should be like batch=8,seq=512")
        found[name.strip()] = int(number)
    return found
