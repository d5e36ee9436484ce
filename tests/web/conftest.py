"""A headless Chromium for the tests of pages: the distribution's own, one per module; nothing is downloaded."""

import shutil
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


class Watched:
    """A page with what it asked for and complained about. allowed: the beginning of addresses that it may ask for."""

    def __init__(self, browser, allowed: str, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.context.route(
            lambda url: not url.startswith(allowed) and not url.startswith("data:"), lambda route: route.abort()
        )

    def foreign(self, allowed: str) -> list[str]:
        return [url for url in self.asked if not url.startswith((allowed, "data:"))]


@pytest.fixture
def open_page(browser):
    """open_page(path or address, **options of the context) -> Watched, loaded."""
    opened: list[Watched] = []

    def open_it(target: Path | str, **options) -> Watched:
        address = target.as_uri() if isinstance(target, Path) else target
        allowed = address if isinstance(target, Path) else address.partition("?")[0]
        watched = Watched(browser, allowed, **{"viewport": {"width": 1440, "height": 900}, **options})
        opened.append(watched)
        watched.page.goto(address)
        return watched

    yield open_it
    for watched in opened:
        watched.context.close()
