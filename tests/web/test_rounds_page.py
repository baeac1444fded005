"""The Rounds page and the page of a round, in a browser; a live round is followed while its files grow."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import Connection, update

from flywheel.config.file import Config
from flywheel.records.round import ClassShare, RoundSelection
from flywheel.records.states import RoundState
from flywheel.store import rounds
from flywheel.store.kernel import schema
from flywheel.store.kernel.transitions import move
from flywheel.system.files import append_jsonl, write_atomic, write_json
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.web.rounds import LogEnd, log_end
from tests.factories.state import write_state
from tests.factories.web import client, text_of
from tests.web.conftest import Check, Visitor

LIVE = "r0003"


def to(conn: Connection, old: RoundState, new: RoundState, why: str = "") -> None:
    move(conn, 3, old, new, why)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "reward_mean": 0.1 * number, "reward_std": 0.2, "groups": 8, "groups_with_spread": 6, "loss": -0.5,
        "grad_norm": 0.05, "entropy": 0.3, "logprob_gap": 4e-7, "completion_tokens_mean": 20.0,
        "truncated_share": 0.0, "seconds": {"generate": 3.0, "grade": 0.1, "sync": 0.1, "train": 1.0}, **more,
    }  # fmt: skip


def cells(page: Page) -> list[str]:
    """The rewards in the table of steps, the newest step first."""
    return page.locator("#steps tbody tr td:nth-child(2)").all_text_contents()


@pytest.fixture
def live_directory(own_state: Config) -> Path:
    """The files of the planned round, which has no figures yet."""
    directory = own_state.state_dir / "rounds" / LIVE
    for name in ("metrics.jsonl", "progress.json", "worker.log"):
        (directory / name).unlink()
    return directory


def test_a_round(check: Check, address: str) -> None:
    page = check(f"{address}/rounds/r0001")
    expect(page.locator("h1")).to_contain_text("promoted")
    expect(page.locator("#now")).to_contain_text("r0001 was promoted")
    expect(page.locator("#charts")).to_have_attribute("data-steps", "12")
    expect(page.locator("figure.chart .plot canvas")).to_have_count(10)
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.5 ± 0.5")
    expect(page.locator("#chart-tools .readout")).to_contain_text("hits 1")
    expect(page.locator("#chart-kl")).to_have_count(0)
    page.get_by_text("The figures of each step as a table").click()
    expect(page.locator("#steps tbody tr")).to_have_count(12)
    expect(page.locator("#steps tbody tr").first).to_contain_text("-0.571")
    link = page.locator("#steps tbody tr").nth(2).get_by_role("link")
    expect(link).to_have_attribute("href", "/rollouts/r0001?step=10")
    assert re.search(r"starting\s*42 s.*training\s*1 min 2 s", page.inner_text("#timeline").replace("\n", " "))
    expect(page.locator("#selection")).to_contain_text("gave no gradient")
    expect(page.locator("#log summary")).to_have_text("The last 60 lines of the log")


def test_a_round_says_how_its_samples_were_chosen(own_state: Config) -> None:
    share = ClassShare(weight=2.0, wanted=3, available=9, chosen=3)
    selection = RoundSelection(
        seed=1, order="the oldest", candidates=20, chosen=5, replayed=1, replayable=4, classes={"one_tool": share},
        widened={"user": 0.5}, left_out={"more than a round takes": 15},
    )  # fmt: skip

    def select(conn: Connection) -> None:
        chosen = {"selection": selection.model_dump(mode="json")}
        conn.execute(update(schema.rounds).where(schema.rounds.c.name == "r0001").values(**chosen))
        first = conn.execute(schema.round_samples.select().where(schema.round_samples.c.split == "train")).first()
        of_first = schema.round_samples.c.task_id == first.task_id, schema.round_samples.c.round_id == 1
        conn.execute(update(schema.round_samples).where(*of_first).values(replayed=True))

    write_state(own_state.state_dir, select)
    page = client(own_state).get("/rounds/r0001").text
    chosen, _, samples = page[page.index('id="selection"') : page.index('id="lineage"')].partition("<ol")
    items = re.findall(r"<li>(.*?)</li>", chosen, re.S)
    assert [" ".join(re.sub(r"<[^>]*>", "", item).split()) for item in items] == [
        "5 of 20 free samples: the oldest",
        "1 of 4 tasks of earlier promoted rounds, drawn at random",
        "one_tool: 3 of 9, 3 by its weight",
        "one user may be 50% of it",
        "left out 15: more than a round takes",
    ]
    assert samples.count("replayed") == 1


def test_the_value_under_the_pointer_and_the_way_to_its_rollouts(visitor: Visitor, address: str) -> None:
    page = visitor.open(f"{address}/rounds/r0001")
    over = page.locator("#chart-reward .u-over")
    expect(over).to_be_visible()
    over.hover(position={"x": 1, "y": 40})
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.281 ± 0.45step 1")
    # The pointers of all charts move together.
    expect(page.locator("#chart-length .readout")).to_contain_text("step 1")
    page.route("**/rollouts/**", lambda route: route.fulfill(body="rollouts"))
    over.click(position={"x": 1, "y": 40})
    page.wait_for_url(re.compile(r"/rollouts/r0001\?step=1$"))


def test_where_the_time_of_a_round_went(own_state: Config, live_directory: Path) -> None:
    metrics = Metrics(live_directory)
    times = {"generate": 10.0, "grade": 5.0, "sync": 1.0, "train": 4.0}
    busy = {"engines": 10.0, "judge": 12.0, "trainer": 4.0}
    for number in range(1, 11):
        metrics.step(number, 10, step(number, seconds=times, busy=busy, overlap=0))
    shown = text_of(client(own_state).get(f"/rounds/{LIVE}").text.partition('id="times"')[2])
    assert "the judge alone 50 s 25 %" in shown
    assert "Idle: engines 50 %, judge 40 %, trainer 80 % of the time." in shown
    assert "training.overlap would have saved about 45 s of 3 min 20 s." in shown


def test_rounds_drawn_over_each_other(check: Check, visitor: Visitor, address: str) -> None:
    page = check(f"{address}/rounds")
    expect(page.locator("#rounds tbody tr")).to_have_count(3)
    expect(page.locator("#live-round")).to_contain_text("It is planned and waits for its worker")
    first = page.locator("#row-r0001")
    expect(first).to_contain_text("0.28 → 0.50")
    expect(first.get_by_role("link", name="+0.177")).to_have_attribute("href", "/gate/r0001")
    expect(first.locator("svg.spark path")).to_have_count(1)
    page.get_by_label("Draw r0001").check()
    page.get_by_label("Draw r0002").check()
    page.get_by_role("button", name="Draw the selected rounds together").click()
    page.wait_for_url(re.compile(r"/rounds/r0002\?with=r0001#curves$"))
    page.goto(f"{address}/rounds/r0002?with=r0001&with=nothing")
    expect(page.locator("#chart-reward .readout")).to_contain_text("r0002 0.921r0001 0.5")
    expect(page.locator("#chart-seconds .readout")).to_contain_text("r0001, all parts 9.97")
    expect(page.get_by_label("r0001", exact=True)).to_be_checked()
    rows = page.get_by_role("region", name="Rounds that are drawn").locator("tbody tr")
    expect(rows).to_have_count(2)
    visitor.check_accessibility(page)


def test_the_samples_of_a_round_page_by_page(shared_state: Config) -> None:
    pages = client(shared_state)

    def items(address: str) -> tuple[list[str], str]:
        """The samples of a page, and the address of the next one."""
        page = pages.get(address).text
        section = page[page.index('id="selection"') : page.index('id="lineage"')]
        following = re.search(r'href="([^"]+)"[^>]*>\s*More', section)
        links = re.findall(r'href="(/tasks/t-[^"]+)"', section)
        return links, html.unescape(following[1]) if following else ""

    seen, address, counts = set[str](), "/rounds/r0001?with=r0002", []
    while address:
        found, address = items(address)
        seen |= {*found}
        counts.append(len(found))
    assert (counts, len(seen)) == ([25, 25, 17], 67)
    assert len(items("/rounds/r0001?with=r0002&split=held-out")[0]) == 24
    assert pages.get(found[0]).status_code == 200


def test_without_scripts(visitor: Visitor, address: str) -> None:
    page = visitor.open(f"{address}/rounds/r0002?with=r0001", scripts=False)
    assert "The curves are drawn with JavaScript." in page.content()
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.921 ± 0.27")
    expect(page.locator("#steps")).to_contain_text("Rounds that are drawn")


def test_what_is_no_round(shared_state: Config) -> None:
    pages = client(shared_state)
    for path, status in (("r0009", 404), ("r0001?after=x", 400), ("r0001?after=-1", 400)):
        assert pages.get(f"/rounds/{path}").status_code == status
    assert pages.get("/rounds?before=1").text.count("There is no older round") == 1
    overlay = pages.get("/rounds/overlay?with=nothing", follow_redirects=False)
    assert (overlay.status_code, overlay.headers["location"]) == (303, "/rounds")


def test_a_live_round(own_state: Config, own_address: str, live_directory: Path, visitor: Visitor) -> None:
    page = visitor.open(f"{own_address}/rounds/{LIVE}")
    now, charts = page.locator("#now"), page.locator("#charts")
    expect(now).to_contain_text("It is planned and waits for its worker")
    page.evaluate("window.isSamePage = true")

    write_state(own_state.state_dir, to, old=RoundState.PLANNED, new=RoundState.TRAINING, why="worker started")
    expect(now).to_contain_text("Its worker is starting and has not reported yet")
    metrics, meter = Metrics(live_directory), Meter(live_directory, steps=3)
    metrics.phase("starting")
    meter.enter("starting")
    expect(now).to_contain_text("not known yet")
    metrics.phase("training", prompts=67)
    # SFT and DPO on recorded replies have no rollouts.
    meter.enter("training")
    expect(now).to_contain_text("1 of 3")
    expect(now).not_to_contain_text("Rollouts of the step")
    meter.enter("training", rollouts=64)
    expect(now).to_contain_text("Rollouts of the step\n0 of 64", use_inner_text=True)
    (live_directory / "worker.log").write_bytes(b"\x1b[36m(Engine)\x1b[0m loaded\r\nstep one\n")
    expect(page.locator("#log")).to_contain_text("The log")

    for number in (1, 2):
        metrics.step(number, 3, step(number))
        meter.stepped(number, 0.1 * number)
        expect(charts).to_have_attribute("data-steps", str(number))
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.2 ± 0.2")
    expect(now.locator("svg.progress")).to_have_attribute("aria-label", "Steps done: 2 of 3")
    expect(now).to_contain_text("0.10 → 0.20")
    # What a reader has opened stays open, and is brought up to date.
    page.get_by_text("The figures of each step as a table").click()
    page.get_by_text("The log").click()
    canvas = page.locator("#chart-reward canvas").element_handle()
    line = orjson.dumps({"event": "step", "step": 3, "steps": 3, **step(3, tools={"hit_rate": 0.75})})
    with metrics.path.open("ab") as file:
        file.write(line[:40])
        file.flush()
        meter.pause("the judge does not answer")
        expect(now).to_contain_text("It is paused: the judge does not answer")
        assert cells(page) == ["0.2", "0.1"]
        file.write(line[40:] + b"\n")
    expect(charts).to_have_attribute("data-steps", "3")
    expect(page.locator("#steps tbody tr")).to_have_count(3)
    # A chart that is new, and one that was drawn on.
    expect(page.locator("#chart-tools .readout")).to_contain_text("hits 0.75")
    assert canvas.evaluate("each => each.isConnected")
    assert page.locator("#log pre").inner_text().splitlines() == ["(Engine) loaded", "step one"]
    meter.pause("")
    meter.enter("evaluating", rollouts=16)
    meter.completed(20)
    expect(now.locator("svg.progress")).to_have_attribute("aria-label", re.compile("Answers done: . of 16"))
    visitor.check_accessibility(page)

    write_state(own_state.state_dir, to, old=RoundState.TRAINING, new=RoundState.EVALUATING, why="trained")
    expect(now).to_contain_text("Its worker has ended")
    finish = {"old": RoundState.EVALUATING, "new": RoundState.REJECTED, "why": "not better"}
    write_state(own_state.state_dir, rounds.finish, round_id=3, **finish)
    expect(page.locator("h1")).to_contain_text("rejected")
    expect(page.locator("#timeline")).to_contain_text("not better")
    assert page.evaluate("window.isSamePage")


def test_a_second_attempt_begins_anew(
    own_state: Config, own_address: str, live_directory: Path, visitor: Visitor
) -> None:
    metrics = Metrics(live_directory)
    write_state(own_state.state_dir, to, old=RoundState.PLANNED, new=RoundState.TRAINING)
    metrics.phase("training")
    for number in (1, 2, 3):
        metrics.step(number, 5, step(number))
    write_json(live_directory / "error.json", {"error": "its GPU is lost", "hint": "Look.", "retryable": True})
    page = visitor.open(f"{own_address}/rounds/{LIVE}")
    expect(page.locator("#charts")).to_have_attribute("data-steps", "3")
    expect(page.locator("#now")).to_contain_text("its GPU is lost")
    write_state(own_state.state_dir, rounds.retry, round_id=3, old=RoundState.TRAINING, why="its worker died")
    expect(page.locator("#facts")).to_contain_text("Attempt\n2", use_inner_text=True)
    (live_directory / "error.json").unlink()
    # The file of the second attempt is longer at once: its steps replace those of the first one.
    lines = [{"event": "step", "step": number, "steps": 5, **step(number + 4)} for number in (1, 2)]
    new = live_directory / "new.jsonl"
    append_jsonl(new, lines)
    write_atomic(metrics.path, new.read_bytes())
    expect(page.locator("#charts")).to_have_attribute("data-steps", "2")
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.6 ± 0.2")
    expect(page.locator("#now")).not_to_contain_text("its GPU is lost")
    with metrics.path.open("wb") as file:
        file.truncate()
    expect(page.locator("#charts")).to_have_attribute("data-steps", "0")
    expect(page.locator("#steps")).to_contain_text("The first step has not ended yet")
    metrics.step(1, 5, step(9))
    expect(page.locator("#chart-reward .readout")).to_contain_text("mean 0.9 ± 0.2")


def test_a_round_whose_files_are_removed(own_state: Config, own_address: str, visitor: Visitor) -> None:
    page = visitor.open(f"{own_address}/rounds/r0001")
    directory = own_state.state_dir / "rounds" / "r0001"
    for name in ("worker.log", "rollouts.jsonl", "evaluation.jsonl", "progress.json"):
        (directory / name).unlink()
    expect(page.locator("#log")).to_contain_text("retention removes the logs of old rounds")
    expect(page.locator("#charts")).to_have_attribute("data-steps", "12")
    shutil.rmtree(directory)
    expect(page.locator("#now")).to_contain_text("is gone. The rest of this page comes from the state.")
    expect(page.locator("#steps")).to_contain_text("the reward was 0.28 at first and 0.50 at last")
    expect(page.locator("figure.chart")).to_have_count(0)
    visitor.check_accessibility(page)


def test_the_list_follows_a_round(
    own_state: Config, own_address: str, live_directory: Path, visitor: Visitor
) -> None:
    page = visitor.open(f"{own_address}/rounds")
    page.get_by_label("Draw r0001").check()
    write_state(own_state.state_dir, to, old=RoundState.PLANNED, new=RoundState.TRAINING)
    meter = Meter(live_directory, steps=8)
    meter.enter("training", rollouts=64)
    expect(page.locator("#live-round")).to_contain_text("1 of 8")
    Metrics(live_directory).step(1, 8, step(1))
    meter.stepped(1, 0.1)
    expect(page.locator("#live-round")).to_contain_text("2 of 8")
    expect(page.locator(f"#row-{LIVE}")).to_contain_text("0.10 → 0.10")
    expect(page.get_by_label("Draw r0001")).to_be_checked()


def test_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_JUDGE_API_KEY", "a-key-that-nobody-may-see")
    path = tmp_path / "worker.log"
    assert log_end(path) is None
    path.write_bytes(b"\x1b[31mred\x1b[0m\r\n10 %\r50 %\r100 %\nkey a-key-that-nobody-may-see, end\nunfinished")
    assert log_end(path) == LogEnd(["red", "100 %", "key [secret], end", "unfinished"], True)
    path.write_bytes(b"".join(b"line %d %s\n" % (number, b"x" * 2_000) for number in range(100)))
    found = log_end(path)
    assert found is not None and not found.is_whole
    assert found.lines[-1].startswith("line 99 ") and len(found.lines[-1]) == 1_001
    assert found.lines[0].startswith("line 6"), "the first line of what was read is not whole"
