"""Why replies fail: the page of a rubric, and the tasks that its figures lead to."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import expect
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.store import ledger, verdicts
from flywheel.store.kernel.schema import tasks
from tests.factories.misses import NAMES, OLD, OTHER, TRUE_MISS, judge, put_misses, verdict
from tests.factories.state import write_state
from tests.factories.trace import START, batch, record, reply
from tests.factories.web import client
from tests.web.conftest import Check, Visitor, serving
from tests.web.recorded_state import config_of

LINK = re.compile(r'<a href="(/tasks\?[^"]*)" aria-label="([\d,]+) of ([\d,]+) replies">')


@pytest.fixture(scope="module")
def missing(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A state with several rubrics and versions, and names that need quoting."""
    config = config_of(tmp_path_factory.mktemp("misses"))
    write_state(config.state_dir, put_misses)
    return config


@pytest.fixture(scope="module")
def missing_address(missing: Config) -> Iterator[str]:
    with serving(missing) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("rubric", [*NAMES])
def test_every_figure_leads_to_exactly_the_tasks_that_it_counts(missing: Config, rubric: str) -> None:
    pages = client(missing)
    page = pages.get(f"/criteria/{quote(rubric, safe='')}")
    assert page.status_code == 200
    links = LINK.findall(page.text)
    # In all, and by adapter, agent, model and week.
    kinds = {frozenset(parse_qs(urlsplit(html.unescape(link)).query)) for link, _, _ in links}
    assert {next(iter(kind - {"rubric", "criterion"}), "") for kind in kinds} == {
        "", "adapter", "agent", "model", "week",
    }  # fmt: skip
    assert len(links) > 30
    for link, part, _ in links:
        lines = pages.get(html.unescape(link).replace("/tasks", "/tasks.jsonl", 1)).text
        assert lines.count("\n") == int(part.replace(",", "")), html.unescape(link)


@pytest.mark.slow
def test_every_number_beside_a_value_is_that_of_its_list(missing: Config) -> None:
    pages = client(missing)
    compared = 0
    for address in ("/tasks", f"/tasks?rubric={quote(OLD)}&order=lowest", "/tasks?adapter=r0001&stage=judged"):
        page = pages.get(address).text
        chosen = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        for name, options in re.findall(
            r'<select id="(\w+)" name="\w+"><option value="">all(.*?)</select>', page, re.S
        ):
            for value, count in re.findall(r'<option value="([^"]*)"[^>]*>.*? \(([\d,]+)\)</option>', options):
                query = {**chosen, name: html.unescape(value)}
                lines = pages.get("/tasks.jsonl", params=query).text
                assert lines.count("\n") == int(count.replace(",", "")), query
                compared += 1
    assert compared > 100


def test_the_overview_begins_with_acceptance_and_what_is_missed_most(missing: Config) -> None:
    pages = client(missing)
    page = pages.get("/").text
    assert page.index("Acceptance by adapter") < page.index("Missed most") < page.index("From reply to round")
    first = re.search(r'Missed most: <a href="([^"]+)"><strong>(.*?)</strong></a>, by .*? ([\d,]+) of ', page, re.S)
    assert first is not None
    lines = pages.get(html.unescape(first[1]).replace("/tasks", "/tasks.jsonl", 1)).text
    assert lines.count("\n") == int(first[3].replace(",", "")) > 0
    # One line for each rubric, about its newest version.
    assert page.count("Missed most:") == len({*NAMES.values()})


def test_the_page_without_an_address_is_of_the_newest_verdict_and_links_the_others(missing: Config) -> None:
    pages = client(missing)
    page = pages.get("/criteria").text
    others = {html.unescape(each) for each in re.findall(r'href="(/criteria/[^"]+)"', page)}
    assert len(others) == 2 and others < {f"/criteria/{quote(each, safe='')}" for each in NAMES}
    refused = pages.get("/criteria/no-such")
    assert refused.status_code == 404 and "No rubric no-such decided a task." in refused.text


def put_many(conn: Connection) -> None:
    """40 weeks and 15 agents, of which the tenth criterion is the least missed."""
    replies = [
        reply(number, agent=f"agent {number % 15:02d}", started_at=START + timedelta(days=7 * number))
        for number in range(40)
    ]
    record(conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=0.7, split_seed=1)
    for task in conn.execute(tasks.select()).scalars().all():
        judge(conn, task, verdict(task % 2 == 0, True, True), OLD)
    verdicts.record_rubric(conn, OLD, "support")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_state(config.state_dir, put_many)
    page = " ".join(client(config).get("/criteria").text.split())
    assert "3 more, with fewer replies, are not shown" in page
    assert "14 older weeks are not shown" in page and "Drawn are the newest 26 weeks, not 14 older ones" in page


def test_hostile_and_long_names_are_texts(check: Check, visitor: Visitor, missing_address: str) -> None:
    page = check(f"{missing_address}/criteria/{quote(OTHER, safe='')}")
    text = page.inner_text("main")
    assert NAMES[OTHER] in text and TRUE_MISS in text and "Q\"uote' & <i>" in text
    assert page.locator("main i, main b").count() == 0
    visitor.check_accessibility(page)


def test_a_filter_changes_list_address_and_counts_and_keeps_the_focus(visitor: Visitor, missing_address: str) -> None:
    page = visitor.open(f"{missing_address}/tasks")
    page.locator("#state").focus()
    page.locator("#state").select_option("held")
    page.wait_for_url("**state=held**")
    expect(page.locator("#state")).to_be_focused()
    held = page.locator("#found tbody tr").count()
    expect(page.locator("#state option:checked")).to_contain_text(f"held ({held})")
    assert page.locator("#criterion").count() == 0 or held > 0
    page.locator("#order").select_option("oldest")
    page.wait_for_url("**order=oldest**")
    assert "state=held" in page.url
    visitor.check(page)
