"""A page in headless Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs Chromium (Debian: apt install chromium): none is on the PATH" if PATH is None else ""
MISSING = MISSING or ("" if find_spec("playwright") else "needs Playwright (pip install playwright)")


@contextmanager
def opened(path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> Iterator["Page"]:
    """A file as a page of its own browser, which may write no error to its console and ask for no other address."""
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=PATH) as browser:
        size = {"width": width, "height": height}
        page = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        yield page
    assert complaints == [path.as_uri()], "nothing else is loaded, nothing fails"
