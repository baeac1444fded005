"""Labels: given beside a task, by keyboard alone, blind, and what they show of the judge."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from playwright.sync_api import Page, expect

from flywheel.config.file import Config
from flywheel.judge.labels import read_labels
from tests.web.conftest import Visitor, serving

LABELLED = 22
"""More than the page of labels lists at once."""


def stored(config: Config) -> list[tuple[str, str, str, bool]]:
    with closing(sqlite3.connect(f"file:{config.state_dir / 'state.db'}?mode=ro", uri=True)) as conn:
        query = "SELECT label, comment, labelled_by, is_blind FROM labels ORDER BY id"
        return [(label, comment, by, bool(blind)) for label, comment, by, blind in conn.execute(query)]


def press(page: Page, key: str) -> None:
    with page.expect_navigation():
        page.keyboard.press(key)
    page.wait_for_load_state()


def test_replies_are_labelled_by_keyboard_alone(own_address: str, visitor: Visitor, own_state: Config) -> None:
    page = visitor.open(f"{own_address}/labels")
    assert page.locator("section[aria-labelledby=queue] tbody tr").count() == 20
    assert "Nobody has labelled" in page.inner_text("main")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Start":
            break
    press(page, "Enter")
    seen = set()
    for number in range(LABELLED):
        seen.add(page.inner_text("p.id"))
        # Blind: neither the verdict nor the state is there to be seen.
        assert page.get_by_role("heading", name="Verdict").count() == 0
        assert page.locator("main .mark").count() == page.get_by_text("Adapter", exact=True).count() == 0
        if number % 10 == 9:
            page.keyboard.press("c")
            page.keyboard.type(f"comment {number} jkaru")
            page.keyboard.press("Escape")
        if number == 20:
            press(page, "j")
            skipped = page.inner_text("p.id")
            press(page, "k")
            assert page.inner_text("p.id") != skipped
        press(page, "aru"[number % 3])
    assert len(seen) == LABELLED
    given = stored(own_state)
    assert [label for label, *_ in given] == [("accept", "reject", "unsure")[n % 3] for n in range(LABELLED)]
    assert [comment for _, comment, *_ in given if comment] == [f"comment {n} jkaru" for n in range(9, LABELLED, 10)]
    assert all(is_blind for *_, is_blind in given)


def test_the_agreement_follows_labels_while_the_page_is_open(
    own_address: str, visitor: Visitor, own_state: Config, tmp_path: Path
) -> None:
    watched = visitor.open(f"{own_address}/labels")
    page = visitor.open(f"{own_address}/tasks?state=accepted")
    tasks = [each.get_attribute("href") for each in page.locator("td.about a").all()[:4]]
    page = visitor.open(f"{own_address}/tasks?state=rejected")
    tasks += [each.get_attribute("href") for each in page.locator("td.about a").all()[:4]]
    for number, task in enumerate(tasks):
        page.goto(f"{own_address}{task}")
        page.get_by_label("Comment").fill("why")
        page.get_by_role("button", name="Accept" if number in (0, 1, 2, 4) else "Reject").click()
        expect(page.locator("#labels")).to_contain_text("Your label")
    expect(watched.locator("#agreement")).to_contain_text("75 %")
    expect(watched.locator("#agreement")).to_contain_text("0.50")
    page.goto(f"{own_address}/labels?only=differing")
    visitor.check_accessibility(page)
    assert page.locator("section[aria-labelledby=given] tbody tr").count() == 2
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    download.value.save_as(tmp_path / "labels.jsonl")
    assert len(read_labels(tmp_path / "labels.jsonl").labels) == 8
    assert json.loads((tmp_path / "labels.jsonl").read_text().splitlines()[0])["reason"] == "why"


def test_a_label_is_given_without_scripts_and_on_one_criterion(
    own_address: str, visitor: Visitor, own_state: Config
) -> None:
    page = visitor.open(f"{own_address}/tasks?state=rejected", scripts=False)
    page.locator("td.about a").first.click()
    about = page.get_by_label("About")
    about.select_option(index=1)
    page.get_by_role("button", name="Unsure").click()
    assert re.search(r"unsure \S+ by ", page.inner_text("#labels"))
    assert [label for label, *_ in stored(own_state)] == ["unsure"]
    assert page.get_by_text("Keyboard shortcuts").is_hidden()


def test_keys_can_be_turned_off(own_address: str, visitor: Visitor, own_state: Config) -> None:
    page = visitor.open(f"{own_address}/tasks?state=rejected")
    with page.expect_navigation():
        page.locator("td.about a").first.click()
    page.get_by_label("Keyboard shortcuts").uncheck()
    page.locator("h1").click()
    page.keyboard.press("a")
    page.reload()
    assert page.locator("kbd:visible").count() == 0
    page.keyboard.press("a")
    assert stored(own_state) == []
    page.get_by_label("Keyboard shortcuts").check()
    press(page, "a")
    assert len(stored(own_state)) == 1


def test_hostile_comments_are_inert(own_address: str, visitor: Visitor) -> None:
    page = visitor.open(f"{own_address}/tasks?text=desrever")
    page.locator("td.about a").first.click()
    page.get_by_label("Comment").fill("<script>document.title='broken'</script>\u202e")
    page.get_by_role("button", name="Reject").click()
    expect(page.locator("#labels")).to_contain_text("<script>")
    visitor.check(page)
    page.goto(f"{own_address}/labels")
    visitor.check(page)


def test_a_held_task_is_released(own_address: str, visitor: Visitor) -> None:
    page = visitor.open(f"{own_address}/tasks?state=held")
    page.locator("td.about a").first.click()
    page.get_by_role("button", name="Release").click()
    assert "1 released" in page.get_by_role("status").inner_text()
    assert "pending" in page.inner_text("h1")
    assert page.get_by_role("button", name="Release").count() == 0
    visitor.check_accessibility(page)


def test_a_read_only_server_has_no_forms(visitor: Visitor, shared_state: Config) -> None:
    with serving(shared_state, is_read_only=True) as found:
        for path in ("/labels", "/dead-letters"):
            assert visitor.open(f"{found}{path}").locator("form[method=post]").count() == 0
        page = visitor.open(f"{found}/tasks?state=held")
        page.locator("td.about a").first.click()
        assert page.locator("form[method=post]").count() == 0
        assert "Nobody has labelled it." in page.inner_text("#labels")
        visitor.close()


def test_the_name_is_that_of_the_sign_in(visitor: Visitor, own_state: Config) -> None:
    with serving(own_state, token="x" * 20) as found:
        page = visitor.open(f"{found}/tasks")
        page.get_by_label("Token").fill("x" * 20)
        page.get_by_label("Your name").fill("Zoë; =")
        page.get_by_role("button", name="Sign in").click()
        page.goto(f"{found}/tasks?state=accepted")
        with page.expect_navigation():
            page.locator("td.about a").first.click()
        press(page, "a")
        assert "by Zoë; =" in page.inner_text("#labels")
        visitor.close()
    assert stored(own_state)[0][2] == "Zoë; ="
