"""Without a state the page in a browser says what to do, and becomes the overview when a state is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from flywheel.config.file import load
from tests import warm
from tests.factories.web import WAIT_SECONDS
from tests.web.conftest import Visitor, serving


@pytest.mark.slow
def test_the_page_becomes_the_overview_when_there_is_a_state(visitor: Visitor, configuration: Path) -> None:
    config = load(configuration)
    with serving(config) as address:
        page = visitor.open(f"{address}/")
        text = page.inner_text("main")
        assert "There is no state yet" in text
        assert f"{config.state_dir}/state.db" in text and str(configuration) in text
        assert "tasks.jsonl: it is there" in text and "missing.sqlite: nothing is there" in text
        assert "listens at 127.0.0.1:4318" in text
        for command in ("doctor", "ingest", "run"):
            assert f"flywheel {command} -c '{configuration}'" in text
        visitor.check_accessibility(page)
        assert not config.state_dir.exists()
        done = warm.run(
            [sys.executable, "-m", "flywheel", "ingest", "-c", str(configuration)],
            capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        assert "1 task" in done.stdout, done.stderr
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        assert page.title() == "Overview · Flywheel"
        expect(page.get_by_role("link", name="1 tasks").first).to_be_visible()
        visitor.check(page)
        visitor.close()
