"""The benchmarks' databases are whole, as large as asked, and tell as many replies as their maker says."""

from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.databases import SCHEMAS, Database, cached, generate
from benchmarks.templates import SOURCES, open_read_only
from flywheel.config.file import parse
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store

SPANS = 1_500


@pytest.fixture(scope="module", params=SCHEMAS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    return cached(tmp_path_factory.mktemp("databases"), SPANS, request.param, seed=3)


def rows(path: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT * FROM span_table ORDER BY rowid").fetchall()
    database.close()
    return found


def test_sqlite_finds_nothing_wrong(made: Database) -> None:
    with sqlite3.connect(made.path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    database.close()


def test_tables_indexes_and_views_are_studios(made: Database) -> None:
    sql = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    with sqlite3.connect(made.path) as database, open_read_only(next(iter(SOURCES[made.schema]))) as model:
        assert database.execute(sql).fetchall() == model.execute(sql).fetchall()
    database.close()
    model.close()


def test_size_and_proportions(made: Database) -> None:
    found = rows(made.path)
    assert len(found) == SPANS == made.truth.spans
    assert len({row[0] for row in found}) == SPANS, "an id was used twice"
    assert len({row[1] for row in found}) == made.truth.traces
    assert 2.4 <= made.truth.spans / made.truth.replies <= 4.6
    assert 0.85 <= made.truth.tasks / made.truth.replies < 1
    size = sum(len(str(cell).encode()) for row in found for cell in row if cell is not None) / SPANS
    assert 2_000 < size < 4_000


def test_traces_interleave(made: Database) -> None:
    traces = [row[1] for row in rows(made.path)]
    changes = sum(before != after for before, after in pairwise(traces))
    assert changes > 1.5 * made.truth.traces


async def test_flywheel_finds_what_was_put_in(made: Database, tmp_path: Path) -> None:
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(made.path)}]}, "the test's", tmp_path)
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    (report,) = await ingestion.run(final=True)
    await ingestion.close()
    await store.close()
    assert report.error is None
    assert (report.counts.replies, report.counts.tasks, report.counts.dead) == (
        made.truth.replies,
        made.truth.tasks,
        0,
    )
    assert report.counts.skipped.get("unfinished", 0) == made.truth.unfinished


def test_the_seed_decides(tmp_path: Path) -> None:
    first, again, other = (
        rows(generate(tmp_path / f"{n}.sqlite", 300, "new", seed=seed).path) for n, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert not {row[0] for row in first} & {row[0] for row in other}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    made = cached(tmp_path, 300, "old")
    before = made.path.stat()
    assert cached(tmp_path, 300, "old") == made
    assert made.path.stat().st_mtime_ns == before.st_mtime_ns
    assert cached(tmp_path, 300, "old", seed=1).path != made.path
