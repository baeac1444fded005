"""Extraction in worker processes: the same results, errors that name what ended it, and nothing left at rest."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from flywheel.config.ingest import IngestSettings
from flywheel.errors import StudioError
from flywheel.records.trace import Cursor, ReplySelection
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.extraction import TraceExtractor
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio.schema import SCHEMAS
from flywheel.sources.studio.trace_completion import CompleteTrace
from flywheel.sources.studio.workers import WORKERS, ExtractionRequest, Workers
from tests.factories.model_call import HIDING, MARK, SENT, marked
from tests.sources.calls.recorded import recorded
from tests.sources.studio.reading import NOW, Ledger
from tests.sources.studio.writer import DATA, NAMES, Studio, agent, chat

NOBODY_LEFT = threading.Event()


@dataclass
class InUse:
    """Workers in use, and the processes that they have started."""

    workers: Workers

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "studio.workers" in " ".join(each.cmdline())]


@pytest.fixture
async def used() -> AsyncIterator[InUse]:
    workers = Workers()
    async with workers.in_use():
        yield InUse(workers)


def complete_in(path: Path) -> tuple[str, tuple[CompleteTrace, ...]]:
    reader = StudioReader(path, IngestSettings())
    steps = list(reader.read(Cursor(), Ledger(), now=NOW, final=True))
    assert reader.schema is not None
    reader.close()
    return reader.schema.name, tuple(trace for step in steps for trace in step.traces)


def request_of(path: Path, *, selection: ReplySelection | None = None, calls: str = "") -> ExtractionRequest:
    schema, traces = complete_in(path)
    return ExtractionRequest(str(path), str(path), 0, schema, selection or ReplySelection(), calls, traces)


@pytest.mark.parametrize("name", NAMES)
def test_traces_come_back_in_order_as_they_are_extracted_here(name: str, used: InUse) -> None:
    request = request_of(DATA / f"{name}.sqlite", selection=ReplySelection(exclude=frozenset({"Solver"})))
    parts = [replace(request, traces=request.traces[at : at + 7]) for at in range(0, len(request.traces), 7)]
    answers = [used.workers.extract(part, NOBODY_LEFT) for part in parts]
    with Database(Path(request.source)) as database:
        here = TraceExtractor(database, SCHEMAS[request.schema], request.selection, request.source)
        for part, answer in zip(parts, answers, strict=True):
            expected, found = here.extract(part.traces), answer.result(60)
            assert replace(found, longest_read_ms=0) == replace(expected, longest_read_ms=0)
            assert found.count == len(part.traces)
    assert len(used.processes()) <= 2


def test_a_killed_process_is_reported_and_the_next_request_gets_another(used: InUse) -> None:
    request = request_of(DATA / "old.sqlite")
    entries = used.workers.extract(request, NOBODY_LEFT).result(60).batch.entries
    for process in used.processes():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(StudioError, match=r"extract replies of .*old\.sqlite.*has died") as caught:
        used.workers.extract(request, NOBODY_LEFT).result(60)
    assert caught.value.retryable
    assert used.workers.extract(request, NOBODY_LEFT).result(60).batch.entries == entries


def test_a_defect_in_extraction_costs_its_own_traces(used: InUse) -> None:
    request = request_of(DATA / "old.sqlite")
    bad = used.workers.extract(replace(request, schema="generation 0"), NOBODY_LEFT)
    with pytest.raises(StudioError, match="KeyError"):
        bad.result(60)
    assert used.workers.extract(request, NOBODY_LEFT).result(60).count == len(request.traces)


def test_an_error_of_the_database_keeps_its_condition(used: InUse, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes((DATA / "old.sqlite").read_bytes())
    request = request_of(path)
    path.write_text("no database " * 1000)
    with pytest.raises(StudioError, match="not a SQLite database") as caught:
        used.workers.extract(request, NOBODY_LEFT).result(60)
    assert (caught.value.condition, caught.value.retryable) == ("not Studio's", False)


async def test_leaving_does_not_wait_for_a_process_that_hangs() -> None:
    request, is_left, workers = request_of(DATA / "old.sqlite"), threading.Event(), Workers()
    async with workers.in_use():
        used = InUse(workers)
        # What the first one is asked while the other works is asked of another one.
        while len(used.processes()) < WORKERS:
            for each in [workers.extract(request, is_left) for _ in range(2 * WORKERS)]:
                each.result(60)
        for process in used.processes():
            process.suspend()
        answers = [workers.extract(request, is_left) for _ in range(3)]
        time.sleep(0.3)
        is_left.set()
        for answer in answers:
            with pytest.raises(StudioError, match="cancelled"):
                answer.result(10)
    assert used.processes() == []


async def test_processes_live_while_a_pass_is_long_and_no_longer() -> None:
    request, workers = request_of(DATA / "old.sqlite"), Workers()
    used = InUse(workers)
    for _ in range(2):
        async with workers.in_use():
            async with workers.in_use():
                workers.extract(request, NOBODY_LEFT).result(60)
            assert len(used.processes()) == 1, "another pass is long"
        assert used.processes() == []


@pytest.mark.parametrize("may_wait", [False, True])
def test_calls_that_are_missing_come_back_by_their_ids_while_they_may_be_pulled(
    used: InUse, tmp_path: Path, may_wait: bool
) -> None:
    studio = Studio(tmp_path / "a.sqlite")
    studio.write(marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2), agent("b", trace="other"))
    request = request_of(studio.path, calls=str(tmp_path / "calls.db"))
    request = replace(request, traces=tuple(replace(trace, may_wait=may_wait) for trace in request.traces))
    found = used.workers.extract(request, NOBODY_LEFT).result(60)
    assert not (tmp_path / "calls.db").exists()
    assert found.missing == ({"trace": [MARK]} if may_wait else {})
    assert [entry.span_id for entry in found.batch.entries] == (["b"] if may_wait else ["a", "b"])
    assert {each.trace_id: each.is_open for each in found.batch.checkpoints} == {"trace": may_wait, "other": False}


def test_recorded_calls_are_read_by_the_worker(used: InUse, tmp_path: Path) -> None:
    studio = Studio(tmp_path / "a.sqlite")
    studio.write(marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))
    with CallLog(tmp_path / "calls.db") as log:
        log.append([recorded({"messages": SENT}, {"choices": [{"message": {"content": "2"}}]}, request_id=MARK)])
        request = request_of(studio.path, calls=str(log.path))
        request = replace(request, traces=tuple(replace(trace, may_wait=True) for trace in request.traces))
        found = used.workers.extract(request, NOBODY_LEFT).result(60)
    assert found.missing == {}
    assert b'"prompt_source":"calls"' in found.batch.entries[0].line


def test_rows_that_are_elsewhere_now_are_not_extracted(used: InUse, tmp_path: Path) -> None:
    studio = Studio(tmp_path / "a.sqlite")
    studio.write(*(agent(f"a{number}", trace=f"t{number}") for number in range(4)))
    request = request_of(studio.path)
    with sqlite3.connect(studio.path) as writer:
        writer.execute("DELETE FROM span_table WHERE id = 'a0'")
        writer.execute("UPDATE span_table SET rowid = rowid - 1")
    writer.close()
    found = used.workers.extract(request, NOBODY_LEFT).result(60)
    assert (found.count, found.batch.entries) == (0, ())


def test_a_worker_leaves_a_log_to_its_last_writer(used: InUse, tmp_path: Path) -> None:
    studio = Studio(tmp_path / "a.sqlite")
    writer = sqlite3.connect(studio.path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    # It takes part in the log from its first question on.
    writer.execute("SELECT count(*) FROM span_table").fetchone()
    studio.write(agent("a"))
    assert used.workers.extract(request_of(studio.path), NOBODY_LEFT).result(60).count == 1
    writer.close()
    assert used.processes() and [each.name for each in tmp_path.iterdir()] == ["a.sqlite"]


@pytest.mark.slow
def test_a_worker_loads_neither_settings_nor_checks(used: InUse) -> None:
    """Loading them takes as long as the extraction of thousands of spans, and 30 MB."""
    entries = used.workers.extract(request_of(DATA / "new_v2.sqlite"), NOBODY_LEFT).result(60).batch.entries
    assert any("tools" in entry.excluded for entry in entries)
    (process,) = used.processes()
    loaded = " ".join(each.path for each in process.memory_maps())
    assert "msgspec" in loaded
    assert "pydantic" not in loaded
    assert "sqlalchemy" not in loaded
    assert "rpds" not in loaded  # of jsonschema
