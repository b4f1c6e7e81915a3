"""The command `remat`, also `python -m remat`: one function adds each command to the parser.

Exit status: 0 done, 1 error, 2 usage, 3 no plan fits the budget. A script that is run has its own.
"""

import argparse
import sys
from collections.abc import Sequence

from .launch import add_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="remat", description="Training steps under a memory budget.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run(commands)
    commands.add_parser("doctor", help="say whether a model can be planned, and where it fails")
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["doctor"]:  # has a parser of its own, and needs torch
        from .doctor import main as doctor

        return doctor(given[1:])
    arguments = parser.parse_args(given)
    status: int = arguments.command(arguments)
    return status
