"""A progress bar for planning that takes longer than a second; nothing where there is no terminal.

While the solver runs it shows the overhead of the best plan so far, the bound, and the gap between them.
"""

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

PARTS = 6
"""Parts that planning reports."""


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that is called with each part as it begins, and with how far it is, after a colon."""
    with tqdm(total=PARTS, desc="remat", disable=None, delay=1.0, leave=False) as bar:
        known: list[str] = []

        def report(text: str) -> None:
            part, _, _ = text.partition(": ")
            bar.set_description(f"remat: {text}")
            if known[-1:] != [part]:
                known.append(part)
                bar.update()

        yield report
