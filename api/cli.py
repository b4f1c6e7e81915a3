"""The command `remat`, also `python -m remat`: one function adds each command to the parser.

Results go to standard output, all else (progress, warnings, where files are) to standard error. Exit status:
0 done, 1 error, 2 usage, 3 no plan fits the budget. A script that is run has its own.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

import shtab

from remat.ir import InfeasibleBudgetError, RematError

from .cli_analyze import add_analyze
from .cli_files import add_compare, add_diff, add_report
from .cli_plan import add_frontier, add_plan
from .cli_target import UsageError, is_ours
from .launch import INFEASIBLE, USAGE, add_run, run

EXAMPLES = """\
examples:
  remat run --budget-gb 20 train.py --lr 1e-4     train as before, under a cap
  remat doctor train.py                           can it be planned, and if not, where does it fail
  remat analyze my_code:build                     what a step takes, when, and for what
  remat plan my_code:build --budget-gb 20         what to keep and what to recompute
  remat plan my_code:build --budget-gb 20 --report out/
  remat diff out/planned.json                     what the plan changes at the peak
  remat compare snapshot.pickle out/planned.json  a snapshot of a GPU beside the prediction
  remat completion bash > ~/.local/share/bash-completion/completions/remat

remat COMMAND --help says more."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="remat",
        description="Training steps under a memory budget.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"remat {version('remat')}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        *(add_run, add_analyze, add_plan, add_frontier),
        *(add_report, add_diff, add_compare, _add_doctor, _add_completion),
    ):
        add(commands)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["doctor"]:  # has a parser of its own, which needs torch
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        from .doctor import main as doctor

        return doctor(given[1:])
    arguments = parser().parse_args(given)
    if arguments.command is not run:  # a script's environment is its own
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler logs each start and stop
    try:
        status: int = arguments.command(arguments)
    except InfeasibleBudgetError as error:
        return _failed(error, INFEASIBLE)
    except UsageError as error:
        return _failed(error, USAGE)
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RematError, OSError) as error:
        if arguments.command is run:
            raise  # the script's own
        return _failed(error, 1)
    except (ValueError, TypeError) as error:  # what was given cannot be meant, if we say so
        if arguments.command is run or not is_ours(error):
            raise
        return _failed(error, USAGE)
    return status


def _failed(error: Exception, status: int) -> int:
    print(
        "\n".join(["remat: error: " + str(error), *getattr(error, "__notes__", ())]),
        file=sys.stderr,
    )
    return status


def _add_doctor(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    commands.add_parser(
        "doctor", help="say whether a model can be planned, and where it fails", add_help=False
    )


def _add_completion(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    completion = commands.add_parser(
        "completion", help="print what a shell needs to complete the command line"
    )
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    completion.set_defaults(command=_complete)


def _complete(arguments: argparse.Namespace) -> int:
    print(shtab.complete(parser(), shell=arguments.shell))
    return 0
