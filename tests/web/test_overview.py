"""The overview in a browser, and the figures on it against the state."""

from __future__ import annotations

import asyncio
import html
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from flywheel.config.file import Config
from flywheel.daemon.status import snapshot
from flywheel.errors import StoreError
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Reader
from flywheel.store.views import acceptance
from flywheel.store.views.acceptance import Share, SharePeriod
from flywheel.web import figures
from flywheel.web.plots import TimePlot
from flywheel.web.site import Site
from tests.factories.state import in_thread, write_state
from tests.factories.trace import on_both_sides
from tests.factories.verdict import put_judged
from tests.factories.web import client, text_of
from tests.web.conftest import NARROW, Check, Visitor
from tests.web.recorded_state import config_of


def test_the_overview_of_a_state(check: Check, address: str) -> None:
    page = check(f"{address}/")
    text = page.inner_text("main")
    assert "demo-agent@r0002" in text and "2 open dead letters" in text
    assert page.locator("#over-time canvas").count() == 1
    page.get_by_text("The shares as a table").click()
    rows = page.get_by_role("region", name="Acceptance over time").locator("tbody tr").all_inner_texts()
    assert {row.split("\t")[1].strip() for row in rows} >= {
        "no recorded model",
        "demo-agent@r0001",
        "demo-agent@r0002",
    }
    assert [row.split("\t")[1] for row in rows if row.endswith("deployed")] == ["r0001", "r0002"]
    assert page.locator("main script, main img, main iframe").count() == 0
    assert "in the last 48 hours, at most" in text
    assert "<script>document.title" in page.get_by_role("region", name="Errors of the judge").inner_text()


def test_an_empty_page_says_what_to_do(visitor: Visitor, empty_address: str) -> None:
    page = visitor.open(f"{empty_address}/", width=NARROW)
    for path, texts in EMPTY.items():
        page.goto(f"{empty_address}{path}")
        shown = page.inner_text("main")
        assert all(text in shown for text in texts.split("; ")), path
        visitor.check_accessibility(page)


@pytest.mark.slow
def test_every_bar_leads_to_the_tasks_that_it_counts(shared_state: Config) -> None:
    """Every reply of this state is a task: the bars of replies lead to the same lists as those of tasks."""
    pages = client(shared_state)
    bars = re.findall(r'<a href="(/tasks\?[^"]*)" aria-label="([\d,]+) ', pages.get("/").text)
    assert len(bars) > 30
    for target, shown in bars:
        lines = pages.get(html.unescape(target).replace("/tasks", "/tasks.jsonl", 1)).text
        assert lines.count("\n") == int(shown.replace(",", "")), target


def test_the_funnel_counts_each_reply_once(shared_state: Config) -> None:
    def count(conn: Connection) -> tuple[acceptance.Funnel, int, dict[str, int]]:
        total, by_source, by_agent = acceptance.funnels(conn)
        for groups in (by_source, by_agent):
            together = acceptance.Funnel()
            for each in groups.values():
                together.add(each)
                assert each.replies >= each.tasks >= each.judged >= each.accepted >= each.usable >= each.used
            assert together == total
        states = select(schema.tasks.c.state, func.count()).group_by(schema.tasks.c.state)
        replies = conn.execute(select(func.count()).select_from(schema.replies)).scalar_one()
        return total, replies, dict(tuple(row) for row in conn.execute(states))

    total, replies, states = in_thread(Reader(shared_state.state_dir).read(count))
    assert total.replies == replies
    assert total.accepted == states["accepted"] + states["reserved"] + states["consumed"]
    assert total.judged == total.accepted + states["rejected"]


def page_of(config: Config, path: str = "/") -> str:
    return text_of(client(config).get(path).text.partition("<main")[2])


def test_free_usable_and_held_out_are_each_one_number_with_the_reason_for_a_difference(shared_state: Config) -> None:
    shown = page_of(shared_state)
    status = in_thread(Reader(shared_state.state_dir).read(snapshot, shared_state))
    own = status["targets"][""]
    total, _, _ = in_thread(Reader(shared_state.state_dir).read(acceptance.funnels, shared_state.takes.train))
    assert total.usable - total.used == own["free_samples"] + sum(own["waiting_samples"].values())
    assert f"Free samples {own['free_samples']} of {own['min_samples']} needed" in shown
    assert f"{total.used} of {total.usable} usable samples are used by rounds" in shown
    assert f"{own['held_out']} for the gate, of {own['gate']['conversations']} conversations" in shown
    assert "Usable samples" not in shown


def test_the_samples_that_wait_are_beside_the_free_ones_and_why_no_round_starts_is_said(tmp_path: Path) -> None:
    write_state(tmp_path / "state", put_judged, *on_both_sides(20, 4))
    few = config_of(tmp_path, gate={"min_tasks": 2, "min_power": 0})
    assert "No round starts now: 20 of 64 samples are free." in page_of(few)
    capped = config_of(
        tmp_path, gate={"min_tasks": 2}, trigger={"min_samples": 8, "max_samples": 8, "cron_min_samples": 1}
    )
    shown = page_of(capped)
    assert "Free samples 8 of 8 needed 12 more than a round takes" in shown
    # The same as the page of the gate.
    [why] = re.findall(r"No round starts now: ([^.]*)", shown)
    assert why in page_of(capped, "/gate")
    enough = capped.model_copy(update={"gate": capped.gate.model_copy(update={"min_power": 0})})
    assert "A round can start: flywheel run plans it." in page_of(enough)


def test_the_plot_has_each_share_at_its_time_and_a_gap_where_there_is_none() -> None:
    begin, hour = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=1)

    def period(name: str, number: int) -> SharePeriod:
        return SharePeriod(name, begin + number * hour, begin + (number + 1) * hour, Share(number, 10))

    plot = TimePlot([period("", 0), period("", 2), period("agent@r0001", 2)], [(begin, "r0001")])
    assert plot.names == ["", "agent@r0001"]
    assert plot.data["ends"] == [(begin + number * hour).timestamp() for number in (0, 3)]
    assert plot.data["times"] == [(begin + (number + 0.5) * hour).timestamp() for number in (0, 2)]
    assert plot.data["marks"] == [(begin.timestamp(), "r0001")]
    [base, adapter] = plot.data["series"]
    assert base[0] == (0.0, 0.2) and [each[0] for each in adapter] == [None, None, None]
    assert adapter[1][1] < adapter[0][1] == 0.2 < adapter[2][1]


def test_figures_that_take_long_are_read_once_in_a_while(
    shared_state: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def count(conn: Connection, config: Config) -> int:
        reads.append(1)
        return len(reads)

    async def read(times: int) -> list[int]:
        own = figures.Figures(Site(shared_state), count)
        reads.clear()
        return await asyncio.gather(*(own.get() for _ in range(times)))

    monkeypatch.setattr(figures, "SLOW_SECONDS", 1e6)
    assert in_thread(read(3)) == [1, 2, 3], "fast figures are always new"
    monkeypatch.setattr(figures, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(figures, "OLDER", 1e6)
    assert in_thread(read(3)) == [1, 1, 1]


@pytest.mark.slow
def test_old_figures_are_shown_while_newer_ones_are_counted(
    shared_state: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(figures, "OLDER", 0)
    reads: list[int] = []

    async def shown() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        class SlowSite(Site):
            async def read(self, *_: Any, **__: Any) -> Any:
                reads.append(1)
                if len(reads) == 2:
                    begun.set()
                    await may_end.wait()
                    raise StoreError("read", "it is broken")
                return len(reads)

        own = figures.Figures(SlowSite(shared_state), lambda conn, config: 0)
        assert await own.get() == 1 and own.counted_at
        assert await own.get() == 1, "nobody waits for newer ones"
        await begun.wait()
        assert [await own.get() for _ in range(3)] == [1, 1, 1] and len(reads) == 2, "they are counted once"
        may_end.set()
        assert own._background is not None
        await own._background
        # What cannot be read is said by the next request: this one, which waits.
        assert await own.get() == 3
        await own.get()
        await own._background
        assert await own.get() == 4

    in_thread(shown())


EMPTY = {
    "/": "flywheel ingest",
    "/tasks": "flywheel ingest",
    "/labels": "flywheel ingest",
    "/rounds": "the base model answers; flywheel round; flywheel deploy",
    "/rollouts": "flywheel round",
    "/gate": "flywheel round",
    "/dead-letters": "No dead letter is open",
    "/dead-letters?state=all": "There has never been one",
}
