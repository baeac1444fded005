"""Pages in a real browser: Chromium of the system, driven by Playwright, on a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from flywheel.config.file import Config
from flywheel.system.web_server import bound_socket, web_server
from flywheel.web import tasks
from flywheel.web.guard import LIMITS
from flywheel.web.server import application
from tests.factories.config import write_config
from tests.factories.state import write_state
from tests.factories.trace import write_lines
from tests.waiting import StartError
from tests.web.recorded_state import copied, unpack

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER = "no Chromium is installed here: apt-get install chromium"
WAIT_MILLISECONDS = 60_000
expect.set_options(timeout=WAIT_MILLISECONDS)
NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", event => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""
POLL_OFTEN = """
const every = window.setInterval;
window.setInterval = (work, milliseconds) => every(work, milliseconds / 10);
"""
"""Open pages look ten times as often for what is new as they do for people."""
AXE = Axe().axe_script
# Of rules that hold axe then gives one element instead of all, which halves its time.
FIND_VIOLATIONS = """
() => axe.run({resultTypes: ["violations"], runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]})
  .then(results => results.violations)
"""
NARROW = 360
WIDE: ViewportSize = {"width": 1280, "height": 900}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in a browser takes seconds."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def patient_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a search that ends early would show less than what a test looks for."""
    monkeypatch.setattr(tasks, "SEARCH_SECONDS", 60.0)


@pytest.fixture(scope="session")
def shared_state(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A state with everything. Tests that change it take `own_state`."""
    return unpack(tmp_path_factory.mktemp("web"))


@pytest.fixture
def own_state(shared_state: Config, tmp_path: Path) -> Config:
    """A copy for one test."""
    return copied(shared_state, tmp_path)


@contextlib.contextmanager
def serving(config: Config, **options: Any) -> Iterator[str]:
    """The pages of a state on a port of their own; the address without a slash at its end."""
    listening = bound_socket("serve pages to a test", "127.0.0.1", 0, "the port")
    server = web_server(application(config, **options), LIMITS, stop_seconds=1)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Modules that use it have no asynchronous tests: Playwright's loop runs in their thread."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(NO_BROWSER)
    # The sandbox needs another user than root. Containers often have little shared memory.
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=arguments)
        except PlaywrightError as error:
            raise StartError(f"{program} did not start: {error}") from error
        yield browser
        browser.close()


@dataclass
class Visitor:
    """Opens pages, and keeps what went wrong in them. Every test with a visitor ends with `assert not problems`."""

    browser: Browser
    problems: list[str] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    def open(
        self,
        address: str,
        *,
        width: int = WIDE["width"],
        scripts: bool = True,
        **more: Any,
    ) -> Page:
        """A page in a context of its own. `more` are options of the context, as `http_credentials`."""
        context = self.browser.new_context(
            color_scheme="light",
            viewport={**WIDE, "width": width},
            java_script_enabled=scripts,
            reduced_motion="reduce",
            **more,
        )
        self._contexts.append(context)
        context.set_default_timeout(WAIT_MILLISECONDS)
        context.set_default_navigation_timeout(WAIT_MILLISECONDS)
        context.add_init_script(NOTE_VIOLATIONS)
        context.add_init_script(POLL_OFTEN)
        page = context.new_page()
        origin = "/".join(address.split("/")[:3])
        page.on("console", lambda message: self._note("console", message.text, message.type in ("error", "warning")))
        page.on("pageerror", lambda error: self._note("script", error.message))
        page.on("request", lambda request: self._note("request", request.url, not request.url.startswith(origin)))
        page.on(
            "response",
            lambda answer: self._note("response", f"{answer.status} {answer.url}", answer.status >= 400),
        )
        page.goto(address)
        return page

    def _note(self, kind: str, text: str, is_problem: bool = True) -> None:
        if is_problem and not text.startswith("data:"):
            self.problems.append(f"{kind}: {text}")

    def check(self, page: Page) -> None:
        """Nothing is wrong with what the page shows now: scripts, policy, requests, width.

        A page that a click led to may have its content before its style sheets, so it waits for those.
        """
        page.wait_for_load_state("load")
        self.problems += [f"policy: {each}" for each in page.evaluate("window.violations")]
        assert not self.problems
        assert page.title() != "broken"
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{page.url} is {wide} pixels too wide"

    def check_accessibility(self, page: Page) -> None:
        """`check`, and what axe finds. Axe takes a second: each kind of page, or of what it shows, has it once."""
        self.check(page)
        page.evaluate(AXE)
        serious = [
            f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes'][:3]]}"
            for each in page.evaluate(FIND_VIOLATIONS)
            if each["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{page.url}: " + "\n".join(serious)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    visitor.close()
    assert not visitor.problems


@pytest.fixture(scope="module")
def address(shared_state: Config) -> Iterator[str]:
    """The pages of the state that tests share."""
    with serving(shared_state) as found:
        yield found


@pytest.fixture
def own_address(own_state: Config) -> Iterator[str]:
    """The pages of a state that a test may change. Tests take it before their visitor: pages are closed first."""
    with serving(own_state) as address:
        yield address


@pytest.fixture(scope="module")
def empty_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The pages of a state without anything."""
    from tests.web.recorded_state import config_of

    config = config_of(tmp_path_factory.mktemp("empty"))

    write_state(config.state_dir, lambda _: None)
    with serving(config) as found:
        yield found


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A configuration without a state, with a task file and a missing database; its folder's name has a blank."""
    folder = tmp_path / "my agents"
    folder.mkdir()
    write_lines(folder / "tasks.jsonl", {"question": "What is 3 plus 4?", "answer": "7"})
    sources = [{"type": "jsonl", "path": "tasks.jsonl"}, {"path": "missing.sqlite"}, {"type": "otlp"}]
    return write_config(folder, sources=sources)


Check = Callable[..., Page]


@pytest.fixture
def check(visitor: Visitor) -> Check:
    """Open an address on a narrow screen and on a wide one, and check each; the page on the wide one is returned."""

    def opened(address: str, **options: Any) -> Page:
        page = visitor.open(address, width=NARROW, **options)
        visitor.check(page)
        page.set_viewport_size(WIDE)
        page.reload()
        visitor.check(page)
        return page

    return opened
