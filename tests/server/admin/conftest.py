"""A browser: headless Chromium, driven by playwright."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, for one module: no other event loop runs in this process meanwhile."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        if program is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium is installed")
        # The sandbox wants privileges that a container seldom has; the pages come from this repository.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    """A new page; what its console complains of fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 1100})
    page.set_default_timeout(60_000)
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    foreign = []
    page.on(
        "request", lambda r: foreign.append(r.url) if not r.url.startswith(("http://127.0.0.1:", "data:")) else None
    )
    yield page
    page.close()
    assert foreign == []
    assert [text for text in said if "status of 401" not in text and "status of 403" not in text] == []
