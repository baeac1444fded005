"""Open pages that follow the state, in a browser: focus, forms that are being used, and a sign-in that has ended."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.records.round import GateTest
from flywheel.records.states import RoundState, TaskState
from flywheel.store import dead_letters, rounds
from flywheel.store.kernel.schema import tasks
from tests.factories.state import write_state
from tests.web.conftest import Visitor, serving

TOKEN = "a-token-of-some-length"
NOTE_FETCHED = """
document.addEventListener("live:updated", ({ detail }) => {
  document.documentElement.dataset.fetched = detail.querySelectorAll("#errors tbody tr").length;
});
"""


def add_letter(conn: Connection, subject: str) -> None:
    dead_letters.dead_letter(conn, dead_letters.ROW, subject, "no JSON", "", None)


def add_round(conn: Connection) -> None:
    rounds.finish(conn, 3, RoundState.PLANNED, RoundState.FAILED, "stopped")
    free = list(conn.execute(tasks.select().where(tasks.c.state == TaskState.ACCEPTED.value).limit(2)).scalars())
    last = rounds.by_name(conn, "r0003")
    rounds.plan(
        conn, Path(last.dir).parent, free, [], GateTest(epoch=1, number=3, alpha=0.001), trigger="by hand", seed=1,
        config_hash="c", rubric_hash="r",
    )  # fmt: skip


def test_focus_stays_where_it_is_when_something_new_comes_before(
    own_state: Config, own_address: str, visitor: Visitor
) -> None:
    page = visitor.open(f"{own_address}/rounds")
    link = page.locator("#row-r0001").get_by_role("link", name="r0001")
    link.focus()
    write_state(own_state.state_dir, add_round)
    expect(page.locator("#rounds tbody tr")).to_have_count(4)
    assert page.locator("#rounds tbody tr").evaluate_all("rows => rows.map(row => row.id)") == [
        "row-r0004", "row-r0003", "row-r0002", "row-r0001",
    ]  # fmt: skip
    expect(link).to_be_focused()
    expect(page.locator("#row-r0003")).to_contain_text("failed")
    visitor.check(page)


def test_a_form_that_is_used_stays_until_it_is_left(own_state: Config, own_address: str, visitor: Visitor) -> None:
    page = visitor.open(f"{own_address}/dead-letters")
    page.evaluate(NOTE_FETCHED)
    rows = page.locator("#errors tbody tr")
    before = rows.count()
    page.locator("#errors tbody button").first.hover()
    write_state(own_state.state_dir, add_letter, subject="span-new")
    expect(page.locator("html")).to_have_attribute("data-fetched", str(before + 1))
    assert rows.count() == before
    page.mouse.move(0, 0)
    expect(rows).to_have_count(before + 1)


def test_a_page_whose_sign_in_has_ended_asks_for_it(own_state: Config, visitor: Visitor) -> None:
    with serving(own_state, token=TOKEN) as address:
        page = visitor.open(f"{address}/rounds")
        page.locator("input[name=token]").fill(TOKEN)
        page.locator("main button").click()
        page.wait_for_url(re.compile(r"/(tasks)?$"))
        page.goto(f"{address}/rounds")
        page.evaluate(NOTE_FETCHED)
        write_state(own_state.state_dir, add_letter, subject="span-first")
        expect(page.locator("html")).to_have_attribute("data-fetched", "0")
        page.context.clear_cookies()
        write_state(own_state.state_dir, add_letter, subject="span-new")
        page.wait_for_url("**/sign-in")
        visitor.close()
