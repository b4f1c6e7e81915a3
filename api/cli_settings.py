"""Options of commands that can also be set in the environment and in pyproject.toml, and reports as files."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_target import UsageError
from .settings import SETTINGS, SettingError, load

if TYPE_CHECKING:
    from .views.step_report import StepReport


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command takes, from the command line and where else they are set."""
    names = arguments.settings
    given = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        found = load(given, Path.cwd()).values
        folder = found.get("report_dir") if "report_dir" in names else None
        if folder:  # now, not after minutes of planning
            Path(folder).mkdir(parents=True, exist_ok=True)
    except SettingError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--report {folder}: {error.strerror}") from error
    return {name: value for name, value in found.items() if name in names}


def save_report(report: "StepReport", folder: str) -> None:
    """Write a report in all formats, and say where."""
    from .views.save import save_all

    written = save_all(report, Path(folder), report.timeline.program)
    print(
        f"remat: wrote {len(written)} files to {folder}: " + ", ".join(p.name for p in written),
        file=sys.stderr,
    )


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that can also be set in the environment and in pyproject.toml."""
    for setting in (each for each in SETTINGS if each.name in names):
        flags = [setting.flag, *(["--report"] if setting.name == "report_dir" else [])]
        parser.add_argument(
            *flags,
            dest=setting.name,
            metavar=setting.metavar,
            help=setting.help,
            default=argparse.SUPPRESS,
        )
    parser.set_defaults(settings=names)
