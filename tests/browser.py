"""A headless Chromium for tests and pictures of HTML reports, without a network.

    python tests/browser.py report.html docs/pictures

writes report-{wide,phone}-{light,dark}.png, for the docs. The browser is that of the environment variable
CHROMIUM, else the first of `NAMES` that is installed; it is driven by playwright, which downloads nothing.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOCAL = ("file:", "data:", "blob:")
PICTURES = {"wide": (1280, 1240), "phone": (390, 1240)}
"""Name -> width and height in CSS pixels."""


def executable() -> str | None:
    """Path of the browser."""
    found = (shutil.which(name) for name in NAMES)
    return os.environ.get("CHROMIUM") or next(filter(None, found), None)


def why_not() -> str:
    """What is missing; empty if pages can be opened."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if executable() else f"none of {', '.join(NAMES)} is installed, CHROMIUM is not set"


@contextmanager
def chromium() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page and what went wrong on it."""

    page: "Page"
    problems: list[str] = field(default_factory=list)
    """Errors of the console and of scripts, dialogs, and requests that need a network."""


@contextmanager
def opened(
    browser: "Browser",
    path: Path,
    *,
    size: tuple[int, int] = (1280, 900),
    theme: str = "light",
    before: str = "",
    scale: float = 1,
) -> Iterator[Opened]:
    """The page once it has drawn or has said why not.

    Args:
        browser: one that runs.
        path: of the page.
        size: of the window, CSS pixels.
        theme: that the system prefers, "light" or "dark".
        before: script that runs before the page's own.
        scale: device pixels in a CSS pixel.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if theme == "dark" else "light",
        device_scale_factor=scale,
        reduced_motion="reduce",
    )
    page = context.new_page()
    found = Opened(page)

    def told(message: "ConsoleMessage") -> None:
        if message.type == "error":
            found.problems.append(message.text)

    def routed(route: "Route") -> None:
        if route.request.url.startswith(LOCAL):
            route.continue_()
        else:
            found.problems.append(f"a request for {route.request.url}")
            route.abort()

    page.on("console", told)
    page.on("pageerror", lambda error: found.problems.append(str(error)))
    page.on("dialog", lambda dialog: found.problems.append(f"a dialog: {dialog.message}"))
    context.route("**/*", routed)
    if before:
        page.add_init_script(before)
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    settle(page)
    yield found
    context.close()


def settle(page: "Page") -> None:
    """Wait until what has been asked for is drawn: two frames."""
    page.evaluate("new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))")


def pictures(report: Path, folder: Path) -> None:
    """The top of the page at two widths in both themes, as PNG with a palette.

    Args:
        report: the page.
        folder: where the pictures go.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, size in PICTURES.items():
            for theme in ("light", "dark"):
                path = folder / f"report-{name}-{theme}.png"
                with opened(browser, report, size=size, theme=theme, scale=2) as view:
                    view.page.screenshot(path=path)
                with Image.open(path) as image:
                    few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                few.save(path, optimize=True)
                print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]))
