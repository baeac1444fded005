"""The rollouts of a round, in a browser: groups by reward, filters, a conversation, and tokens by class."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from flywheel.config.file import Config
from flywheel.training.data.rollout_file import step_file, write_step
from flywheel.web.rollouts import TOKENS_PER_PAGE, RolloutSelection, listed, token_runs
from tests.factories.rollout import rollout, sample
from tests.factories.web import client
from tests.web.conftest import NARROW, Check, Visitor, serving
from tests.web.recorded_state import HOSTILE


def groups(page: Page) -> int:
    return page.locator("table.groups tbody tr").count()


def test_a_recorded_round(check: Check, address: str) -> None:
    """Of an earlier version, which had the rollouts of all steps in one file."""
    page = check(f"{address}/rollouts")
    assert page.url.endswith("/rollouts/r0002")
    assert groups(page) == 25
    assert page.locator("table.groups .chip").count() > 100
    page.get_by_label("Order", exact=True).select_option("oldest")
    page.wait_for_url("**order=oldest*")
    page.locator("table.groups tbody tr td.number a", has_text="1").first.wait_for()
    page.locator("td.about > a").first.click()
    page.wait_for_url("**/rollouts/r0002/1-0")
    assert page.get_by_role("heading", level=1).inner_text() == "Step 1, group 0 of r0002"
    check(page.url)


def test_a_bar_leads_to_its_rollouts_and_a_step_of_a_round_to_its_groups(shared_state: Config) -> None:
    pages = client(shared_state)
    page = pages.get("/rollouts/r0001?step=3").text
    rows = page.partition('class="list groups"')[2].partition("</table>")[0].split("<tr>")[2:]
    assert rows and {re.sub(r"<[^>]*>", "", row.partition("</td>")[0]).strip() for row in rows} == {"3"}
    target, label = re.findall(r'<a href="(/rollouts/r0001\?[^"]*lowest=[^"]*)" aria-label="(\S+) ', page)[0]
    assert f"with {label} selected rollout" in pages.get(html.unescape(target)).text


# Fixtures that serve a state stand before `check` and `visitor`, so that pages are closed before their server.


@pytest.fixture
def hostile_address(own_state: Config) -> Iterator[str]:
    """The pages of a debug round with hostile texts wherever a rollout has any."""
    directory = own_state.state_dir / "rounds" / "debug"
    directory.mkdir()
    criteria = [{"criterion": HOSTILE, "choice": HOSTILE, "value": 0.0, "passed": False, "reason": HOSTILE}]
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    steps = [
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "name": HOSTILE, "content": HOSTILE},
    ]
    tokens = sample(text=[HOSTILE] * 6)
    evil = rollout(answer=HOSTILE, criteria=criteria, steps=steps, samples=[tokens, tokens], truncated=True)
    miss = rollout(reward=None, advantage=None, criteria=[], error=HOSTILE, samples=[])
    for each, missed in ((evil, False), (miss, True)):
        each |= {"missed": missed, "dropped": None, "task_id": HOSTILE}
    write_step(step_file(directory, 1), [evil, miss])
    with serving(own_state) as address:
        yield address


def test_hostile_rollouts_are_inert(hostile_address: str, visitor: Visitor) -> None:
    page = visitor.open(f"{hostile_address}/rollouts", width=NARROW)
    for path in ("", "/1-0?rollout=1&sample=1", "/1-0?rollout=2", "/1-0?rollout=1"):
        page.goto(f"{hostile_address}/rollouts/debug{path}")
        visitor.check(page)
        text = page.inner_text("main")
        assert "<script>" in text and "U+202E" in text
        assert page.locator("main script, main img, main iframe").count() == 0
    visitor.check_accessibility(page)


@pytest.fixture
def debug_address(own_state: Config) -> Iterator[str]:
    """The pages of a debug round with one rollout."""
    directory = own_state.state_dir / "rounds" / "debug"
    directory.mkdir()
    write_step(step_file(directory, 1), [rollout(missed=False, dropped=None, advantage=0.5)])
    with serving(own_state) as address:
        yield address


def test_a_step_appears_while_the_page_is_open(debug_address: str, visitor: Visitor, own_state: Config) -> None:
    page = visitor.open(f"{debug_address}/rollouts/debug")
    assert page.locator("table.groups tbody tr td:first-child").first.inner_text() == "1"
    write_step(step_file(own_state.state_dir / "rounds" / "debug", 13), [line(13, 0)])
    page.locator("table.groups tbody tr td:first-child", has_text="13").wait_for()
    visitor.check(page)


def test_tokens_are_shown_by_class_and_in_figures(debug_address: str, check: Check, visitor: Visitor) -> None:
    page = check(f"{debug_address}/rollouts/debug/1-0")
    shown = page.locator(".tokens .t")
    assert [shown.nth(place).get_attribute("class") for place in range(shown.count())] == [
        "t t-context", "t t-p0", "t t-p1", "t t-unknown", "t t-p3",
    ]  # fmt: skip
    assert shown.nth(1).get_attribute("title") == "95.1%, logprob -0.05"
    colours = {shown.nth(place).evaluate("each => getComputedStyle(each).backgroundColor") for place in range(1, 5)}
    assert len(colours) == 4
    assert page.locator(".legend li").count() == 6
    visitor.check_accessibility(page)
    said = "each => getComputedStyle(each, '::after').content"
    assert shown.nth(1).evaluate(said) == "none"
    page.get_by_label("Show the probability of each token in figures").check()
    assert "95.1%, logprob -0.05" in shown.nth(1).evaluate(said) and shown.nth(0).evaluate(said) == "none"
    assert "with the advantage +0.50" in page.inner_text("#tokens")
    visitor.check(page)


def test_what_is_not_there_is_a_page_that_says_so(shared_state: Config, own_state: Config) -> None:
    for path in (
        "r9999", "r0001?lowest=x", "r0001?order=x", "r0001?end=x", "r0001?step=-1", "r0001?after=1:x",
        "r0001/1-99", "r0001?lowest=nan", "r0001/1-0?rollout=99", "r0001/1-0?from=-1",
    ):  # fmt: skip
        answer = client(shared_state).get(f"/rollouts/{path}")
        assert answer.status_code in (400, 404), path
        assert "There is no" in answer.text or "has no" in answer.text, path
    (own_state.state_dir / "rounds" / "r0001" / "rollouts.jsonl").unlink()
    assert "retention removes" in client(own_state).get("/rollouts/r0001").text


def select(directory: Path, **given: str) -> list[tuple[int, int]]:
    """The groups of a selection, over all its pages."""
    wanted, found = RolloutSelection(**given), []
    while True:
        page = listed(directory, wanted)
        found += [(group.step, group.group) for group in page.groups]
        if not page.more:
            return found
        wanted = RolloutSelection(**{**given, "after": page.more})


def line(step: int, group: int, **values: Any) -> dict[str, Any]:
    return rollout(step=step, group=group, task_id=f"t-{group}", **{"missed": False, "dropped": None, **values})


@pytest.fixture
def round_directory(tmp_path: Path) -> Path:
    """40 steps of 2 groups of 2 rollouts: rewards step/40 and 1 - step/40 in group 0, none in group 1."""
    for step in range(1, 41):
        write_step(
            step_file(tmp_path, step),
            [
                line(step, 0, reward=step / 40, criteria=[], truncated=step == 7),
                line(step, 0, reward=1 - step / 40),
                line(step, 1, reward=None, missed=True, dropped="misses", criteria=[]),
                line(step, 1, reward=None, error="the judge was away", dropped="misses", criteria=[]),
            ],
        )
    return tmp_path


def test_every_order_has_each_group_once_over_its_pages(round_directory: Path) -> None:
    everything = {(step, group) for step in range(1, 41) for group in (0, 1)}
    for order in ("", "newest", "oldest", "lowest", "highest", "spread"):
        found = select(round_directory, order=order)
        assert len(found) == len(everything) and set(found) == everything
    assert select(round_directory)[:3] == [(40, 0), (40, 1), (39, 0)]
    assert select(round_directory, order="spread")[:1] == [(40, 0)]
    assert select(round_directory, order="lowest")[40:] == [(step, 1) for step in range(1, 41)]


def test_filters_select_groups_by_their_rollouts(round_directory: Path) -> None:
    assert select(round_directory, step="3") == [(3, 0), (3, 1)]
    assert select(round_directory, task="t-1", order="oldest")[:2] == [(1, 1), (2, 1)]
    assert select(round_directory, end="truncated") == [(7, 0)]
    assert len(select(round_directory, end="missed")) == 40
    assert len(select(round_directory, end="untrained")) == 40
    assert len(select(round_directory, end="ungraded")) == 40
    assert len(select(round_directory, criterion="right")) == 40
    assert select(round_directory, lowest="0.96") == [(40, 0), (39, 0), (1, 0)]
    found = listed(round_directory, RolloutSelection(lowest="0.96"))
    assert (found.rollouts, found.steps, found.criteria) == (3, (1, 40), ["right"])
    assert sum(found.bins) == found.rewards == 3


def test_a_long_sample_is_shown_in_parts() -> None:
    count = 2 * TOKENS_PER_PAGE + 5
    long = sample(
        token_ids=list(range(count)),
        loss_mask=[0] * count,
        logprobs=[None] * count,
        text=["x"] * (count - 1) + [None],
    )
    found = [token_runs(long, start) for start in (0, TOKENS_PER_PAGE, 2 * TOKENS_PER_PAGE)]
    assert [[run.tokens for run in part] for part in found] == [[TOKENS_PER_PAGE], [TOKENS_PER_PAGE], [5]]
    assert found[2][0].text == f"xxxx<{count - 1}>"
    assert json.dumps(token_runs(long, count)) == "[]"
