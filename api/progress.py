"""A progress bar for planning that takes longer than a second; nothing where there is no terminal."""

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

PARTS = 6
"""Parts that planning reports."""


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that is called with the name of each part as it begins."""
    with tqdm(total=PARTS, desc="remat", disable=None, delay=1.0, leave=False) as bar:

        def report(part: str) -> None:
            bar.set_description(f"remat: {part}")
            bar.update()

        yield report
