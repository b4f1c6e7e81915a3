"""The first training call of a script: what is called, with what; the script ends there."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from .assumed_loss import assumed_loss
from .doctor import Example
from .finder import Arguments, Finder
from .launch import execute


class _Reached(BaseException):
    """Ends the script; no handler of its own is meant for it."""


def first_call(script: Path, arguments: Sequence[str]) -> Example:
    """Run a script up to its first training call.

    Args:
        script: its path.
        arguments: of the script.

    Raises:
        ValueError: it ends without one.
    """
    found: list[Example] = []

    def reached(module: nn.Module, call: Arguments, early: int) -> None:
        found.append(Example(module, *call, assumed_loss))
        raise _Reached

    Finder(reached).install()
    try:
        execute([str(script), *arguments], is_module=False)
    except (_Reached, SystemExit):
        pass
    if not found:
        raise ValueError(
            f"{script} has ended without a training call of a module whose parameters are in an optimizer"
        )
    return found[0]
