"""Dead letters in a browser: by error, retried and dropped, with who asked."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from sqlalchemy import Connection

from flywheel.cli.app import this_person
from flywheel.config.file import Config
from flywheel.daemon import requests
from flywheel.store import dead_letters
from flywheel.system.lock import instance_lock
from tests.factories.state import write_state
from tests.web.conftest import Check, Visitor


def test_one_is_dropped_and_one_is_retried(own_address: str, visitor: Visitor, check: Check) -> None:
    page = visitor.open(f"{own_address}/dead-letters")
    assert page.locator("#errors section").count() > 0
    before = page.locator("#errors tbody tr").count()
    page.get_by_role("button", name="Drop dead letter").first.click()
    assert "1 dropped" in page.get_by_role("status").inner_text()
    page.get_by_role("button", name="Retry dead letter").first.click()
    assert "1 retried" in page.get_by_role("status").inner_text()
    assert page.locator("#errors tbody tr").count() == before - 2
    assert this_person() in page.inner_text("#requests")
    visitor.check_accessibility(page)
    check(f"{own_address}/dead-letters?state=all")


def test_a_retry_that_waits_is_carried_out_and_the_page_learns_of_it(
    own_address: str, visitor: Visitor, own_state: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "WAIT_SECONDS", 0.3)
    page = visitor.open(f"{own_address}/dead-letters")
    with instance_lock(own_state.state_dir):
        page.get_by_role("button", name="Retry dead letter").first.click()
        assert "It waits" in page.get_by_role("status").inner_text()
    other = visitor.open(f"{own_address}/dead-letters")
    other.get_by_role("button", name="Retry dead letter").first.click()
    expect(page.locator("#requests tbody tr").last).to_contain_text("done")


def test_errors_that_differ_only_in_numbers_are_retried_together(
    own_address: str, own_state: Config, visitor: Visitor
) -> None:
    def fill(conn: Connection) -> None:
        for number in range(130):
            error = "the file ends early" if number % 13 == 0 else f"line {number} is no object"
            dead_letters.dead_letter(conn, dead_letters.ROW, f"many-{number}", error)

    write_state(own_state.state_dir, fill)
    page = visitor.open(f"{own_address}/dead-letters")
    card = page.locator("#errors section").first
    assert "120 dead letters" in card.inner_text()
    assert card.locator("tbody tr").count() == 5
    card.get_by_role("link", name="All 120").click()
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_role("link", name="Older").click()
    expect(page.locator("tbody tr")).to_have_count(20)
    page.get_by_role("button", name="Retry all 120").click()
    assert "120 retried" in page.get_by_role("status").inner_text()
    assert "10 dead letters" in page.locator("#errors section").first.inner_text()
