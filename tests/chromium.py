"""A headless Chromium, where there is one: for the report's tests and its picture in the docs.

python tests/chromium.py PAGE.html PICTURE.png
"""

import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)


@functools.cache
def find_chromium() -> str | None:
    """ACMOE_CHROMIUM, or one on the PATH, or the one playwright installed for itself."""
    asked = os.environ.get("ACMOE_CHROMIUM")
    if asked:
        return asked
    for name in NAMES:
        if found := shutil.which(name):
            return found
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as play:
        own = play.chromium.executable_path
    return own if Path(own).is_file() else None


def why_not() -> str | None:
    """Why pages cannot be opened here; None: they can."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    if find_chromium() is None:
        return "no Chromium found: install one, or set ACMOE_CHROMIUM to its path"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser for as long as `with` lasts."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()  # outside of `with`: it may start playwright itself
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


def picture(page_path: Path, out: Path) -> None:
    """The curves and the explorer of a report, as a reader sees them."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1120, "height": 900}, color_scheme="light")
        page.goto(page_path.resolve().as_uri())
        page.locator("#explorer-layer").fill("3")
        page.locator(".token").nth(37).click()
        page.evaluate("window.scrollTo({ top: 0, behavior: 'instant' })")  # boxes count from there
        top = page.locator("#curves").bounding_box()
        bottom = page.locator("#explorer").bounding_box()
        height = bottom["y"] + bottom["height"] - top["y"]
        clip = {"x": 0, "y": top["y"], "width": 1120, "height": height + 24}
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(out), full_page=True, clip=clip)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
