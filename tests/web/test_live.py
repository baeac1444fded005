"""Streams of changes: what they watch, when they tell, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx2
import pytest

from flywheel.config import Config, parse
from flywheel.records.states import RoundState
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.system.web_server import bound_socket, web_server
from flywheel.web import live, server
from flywheel.web.guard import LIMITS
from flywheel.web.site import Site
from tests.cases import for_each
from tests.web.gate_rounds import put_round


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse({"state": {"dir": str(tmp_path / "state")}}, "test", tmp_path)


@pytest.fixture
async def store(config: Config) -> AsyncIterator[Store]:
    opened = await Store.open(config.state_dir)
    yield opened
    await opened.close()


@pytest.fixture
async def directory(config: Config, store: Store) -> Path:
    """That of an unfinished round."""
    await store.write(partial(put_round, number=1, state=RoundState.TRAINING, directory=config.state_dir / "rounds"))
    found = config.state_dir / "rounds" / "r0001"
    found.mkdir(parents=True)
    return found


@for_each(
    ("page", "found"),
    [
        ("/", (None, True)),
        ("/rounds?before=3", (None, True)),
        ("/rounds/r0007?with=r0001", ("r0007", False)),
        ("/rollouts/r0007/3", ("r0007", False)),
        ("/rollouts?round=r0007", ("r0007", False)),
        ("/tasks?state=accepted", (None, False)),
        ("/rounds/..%2F..%2Fetc", ("../../etc", False)),
        ("//[", (None, False)),
    ],
)
def test_what_a_page_shows(page: str, found: tuple[str | None, bool]) -> None:
    assert live.round_of(page) == found


async def test_a_change_of_the_state_is_told_once(config: Config, store: Store) -> None:
    stream = live.Stream(Site(config), "/tasks")
    await stream.has_changed()
    assert not await stream.has_changed()
    await store.write(partial(database.note, key=database.JUDGE_NOTE, value="it does not answer"))
    assert await stream.has_changed()
    assert not await stream.has_changed()


async def test_files_of_the_shown_round(config: Config, directory: Path) -> None:
    stream = live.Stream(Site(config), "/rounds/r0001")
    other = live.Stream(Site(config), "/tasks")
    await stream.has_changed()
    await other.has_changed()
    metrics = directory / "metrics.jsonl"
    metrics.write_bytes(b'{"event": "phase"}\n')
    assert await stream.has_changed()
    assert not await other.has_changed()
    with metrics.open("ab") as file:
        file.write(b"{}\n")
    assert await stream.has_changed()
    metrics.unlink()
    directory.rmdir()
    assert await stream.has_changed()
    assert not await stream.has_changed()


async def test_the_list_watches_the_round_that_begins_while_it_is_open(config: Config, store: Store) -> None:
    stream = live.Stream(Site(config), "/rounds")
    await stream.has_changed()
    rounds = config.state_dir / "rounds"
    await store.write(partial(put_round, number=1, state=RoundState.TRAINING, directory=rounds))
    assert await stream.has_changed()
    (rounds / "r0001").mkdir(parents=True)
    (rounds / "r0001" / "progress.json").write_bytes(b"{}")
    assert await stream.has_changed()


async def test_without_a_state_and_with_one_that_cannot_be_read(config: Config) -> None:
    stream = live.Stream(Site(config), "/rounds")
    await stream.has_changed()
    config.state_dir.mkdir(parents=True, exist_ok=True)
    (config.state_dir / "state.db").write_bytes(b"This is no database. " * 100)
    assert await stream.has_changed()
    assert not await stream.has_changed()


async def test_an_unknown_round_is_nothing_to_watch(config: Config, directory: Path) -> None:
    stream = live.Stream(Site(config), "/rounds/..%2Fr0001")
    await stream.has_changed()
    (directory / "metrics.jsonl").write_bytes(b"{}\n")
    assert not await stream.has_changed()


async def test_served_until_the_server_stops(
    config: Config, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.2)
    listening = bound_socket("serve pages to a test", "127.0.0.1", 0, "the port")
    running = web_server(server.application(config), LIMITS, stop_seconds=60, at_end=live.stop)
    task = asyncio.create_task(running.serve([listening]))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/live?page=/rounds/r0001"
    async with httpx2.AsyncClient(timeout=30) as client, client.stream("GET", address) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.aiter_lines()
        assert await anext(lines) == "retry: 2000"
        (directory / "metrics.jsonl").write_bytes(b"{}\n")
        while (line := await anext(lines)) != "event: changed":
            assert line in ("", ": ", ":")
        while not (await anext(lines)).startswith(":"):
            pass
        running.should_exit = True
        # The stream ends by itself: no connection keeps the server.
        rest = [line async for line in lines]
    assert all(line in ("", ": ", ":") or line.startswith(("event", "data")) for line in rest)
    await asyncio.wait_for(task, 30)
    assert not live._open
