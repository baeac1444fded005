"""A long ingestion says how far it is: bars on a terminal, lines of log elsewhere, nothing in the way of JSON."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from unittest.mock import Mock

import pytest

from flywheel.cli import progress_bars
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.studio_connector import Progress
from flywheel.store.kernel.database import Store
from tests.cli.conftest import Run
from tests.cli.terminal import in_terminal
from tests.factories.config import make_config, write_config
from tests.sources.studio.writer import empty_like, renamed
from tests.waiting import until

SPANS = 10_000


def grow(path: Path, spans: int, first: int = 0) -> int:
    """Add the rows of a fixture over and over, under new ids, until there are so many more."""
    added = 0
    database = sqlite3.connect(path)
    while added < spans:
        rows = renamed("new_v2", first)
        database.executemany(f"INSERT INTO span_table VALUES ({','.join('?' * len(rows[0]))})", rows)
        added += len(rows)
        first += 1
    database.commit()
    database.close()
    return added


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with one long source and a short one."""
    grow(empty_like("new_v2", tmp_path / "long.sqlite"), SPANS)
    grow(empty_like("new_v2", tmp_path / "short.sqlite"), 1)
    return write_config(tmp_path, sources=[{"path": "long.sqlite"}, {"path": "short.sqlite"}])


@pytest.mark.slow
def test_a_terminal_shows_a_bar_for_the_long_source_only_and_json_is_alone_on_stdout(
    config: Path, tmp_path: Path
) -> None:
    seen = in_terminal(tmp_path, ["ingest", "--json", "-c", config], columns=80, home=tmp_path, piped=True)
    assert seen.code == 0
    assert json.loads(seen.piped)["new"] > 0
    bars = [line for line in seen.lines if re.search(r"\d/s ", line)]
    read = [re.search(r"(\d+)/(\d+) +[\d,.]+/s", line) for line in bars]
    steps = [(int(found[1]), int(found[2])) for found in read if found]
    assert len(steps) > 1, seen.screen
    assert steps == sorted(steps)
    assert 0 < steps[0][0] < steps[0][1] >= SPANS
    assert all(len(line) <= 80 and "short.sqlite" not in line for line in bars)


@pytest.mark.slow
def test_without_a_terminal_the_log_says_it_now_and_then(
    flywheel: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.05)
    ran = flywheel("--log-format", "json", "ingest", "--json", "-c", config)
    assert ran.code == 0
    assert ran.json["new"] > 0
    logged = [json.loads(line)["message"] for line in ran.err.splitlines()]
    long = re.escape(str(config.parent / "long.sqlite"))
    entry = re.compile(long + r": ([\d,]+) of ([\d,]+) rows read, [\d,.]+/s, [\w ]+ left")
    found = [match.groups() for message in logged if (match := entry.fullmatch(message))]
    assert found, ran.err
    assert all(int(read.replace(",", "")) < int(of.replace(",", "")) for read, of in found)


async def test_the_log_has_each_source_that_is_being_read_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    caplog.set_level("INFO", "flywheel")
    counts = {"short": Progress(10, 200), "unknown": Progress(7), "read": Progress(5, 5), "begun": Progress(0, 9)}
    sources = [Mock(path=tmp_path / name, connector=Mock(progress=each)) for name, each in counts.items()]
    async with progress_bars.beside(progress_bars.of_sources(Mock(sources=lambda: sources))):
        await until(lambda: len(caplog.messages) >= 2, "two entries")
    short, unknown = caplog.messages[:2]
    assert re.fullmatch(re.escape(f"{tmp_path}/short") + r": 10 of 200 rows read, [\d,.]+/s, [\w ]+ left", short)
    assert re.fullmatch(re.escape(f"{tmp_path}/unknown") + r": 7 rows read, [\d,.]+/s", unknown)
    assert not any(f"{tmp_path}/{name}:" in caplog.text for name in ("read", "begun"))


@pytest.mark.slow
def test_a_short_ingestion_says_nothing(flywheel: Run, tmp_path: Path) -> None:
    grow(empty_like("new_v2", tmp_path / "short.sqlite"), 1)
    assert flywheel("ingest", "--source", "short.sqlite").err == ""
    seen = in_terminal(tmp_path, ["ingest", "--source", "short.sqlite"], columns=80, home=tmp_path)
    assert (seen.code, re.search(r"\d/s ", seen.screen)) == (0, None)


@pytest.mark.slow
async def test_progress_counts_what_this_pass_has_to_read(tmp_path: Path, store: Store) -> None:
    path = empty_like("new_v2", tmp_path / "database.sqlite")
    first = grow(path, 5_000)
    config = make_config(tmp_path, sources=[{"path": str(path)}])
    ingestion = Ingestion(store, config)
    (source,) = ingestion.sources()
    try:
        await source.read(final=True)
        assert (source.connector.progress.read, source.connector.progress.in_all) == (first, first)
        second = grow(path, 5_000, first=1_000)
        await source.read(final=True)
        assert (source.connector.progress.read, source.connector.progress.in_all) == (second, second)
        await source.rescan(whole=True, throttled=False)
        assert (source.connector.progress.read, source.connector.progress.in_all) == (first + second, first + second)
    finally:
        await ingestion.close()
