"""Extraction in a child process: the same results in the same order, and errors that name what ended it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from flywheel.config import IngestSettings
from flywheel.errors import StudioError
from flywheel.records.task import Batch
from flywheel.records.trace import Cursor, ReplySelection
from flywheel.sources.spans.extraction_process import ExtractionProcess
from flywheel.sources.spans.replies import extract
from flywheel.sources.studio import database
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.reader import StudioReader
from tests.factories.model_call import HIDING, MARK, marked, recorded_call
from tests.sources.studio.reading import NOW, Ledger
from tests.sources.studio.writer import DATA, NAMES, Studio, agent, chat


@pytest.fixture
def process() -> Iterator[ExtractionProcess]:
    made = ExtractionProcess()
    yield made
    made.close()


def batches_of(name: str) -> tuple[str, list[Batch]]:
    reader = StudioReader(DATA / f"{name}.sqlite", IngestSettings())
    batches = list(reader.read(Cursor(), Ledger(), now=NOW, final=True))
    assert reader.schema is not None
    reader.close()
    return reader.schema.name, batches


def long_batch() -> tuple[str, Batch]:
    """A batch that is longer than the buffer of a connection, and so is its answer."""
    schema, batches = batches_of("new_v2")
    return schema, Batch(None, traces=tuple(trace for batch in batches for trace in batch.traces) * 20)


@pytest.mark.parametrize("name", NAMES)
def test_batches_come_back_in_order_as_extract_returns_them(
    name: str, process: ExtractionProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAGE_ROWS", 40)
    monkeypatch.setattr(reading, "BATCH_ROWS", 40)
    schema, batches = batches_of(name)
    assert len(batches) > 1
    selection = ReplySelection(exclude=frozenset({"Solver"}))
    answers = [process.extract(batch, schema, selection, "a.sqlite") for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        assert answer.result(60) == extract(batch, schema, selection, "a.sqlite")


@pytest.mark.slow
def test_long_batches_and_long_answers_do_not_block_each_other(process: ExtractionProcess) -> None:
    """Neither fits into the connection's buffer, and no answer is asked for before all batches are sent."""
    schema, batch = long_batch()
    answers = [process.extract(batch, schema, ReplySelection(), "a.sqlite") for _ in range(4)]
    alone = len(extract(batch, schema, ReplySelection(), "a.sqlite").entries)
    assert [len(answer.result(120).entries) for answer in answers] == [alone] * 4


def test_a_killed_process_is_reported(process: ExtractionProcess) -> None:
    schema, batches = batches_of("old")
    os.kill(process.pid, signal.SIGKILL)
    answers = [process.extract(batches[0], schema, ReplySelection(), "a.sqlite") for _ in range(3)]
    for answer in answers:
        with pytest.raises(StudioError, match=r"extract replies of a\.sqlite.*has died") as caught:
            answer.result(60)
        assert caught.value.retryable


def test_a_defect_in_extraction_costs_its_own_batch(process: ExtractionProcess) -> None:
    schema, batches = batches_of("old")
    bad = process.extract(
        replace(batches[0], traces=(({1: b"no row"}, False),)), schema, ReplySelection(), "a.sqlite"
    )
    good = process.extract(batches[0], schema, ReplySelection(), "a.sqlite")
    with pytest.raises(StudioError, match="ValueError"):
        bad.result(60)
    assert good.result(60) == extract(batches[0], schema, ReplySelection(), "a.sqlite")


def test_closing_does_not_wait_for_a_child_that_hangs() -> None:
    schema, batch = long_batch()
    process = ExtractionProcess()
    os.kill(process.pid, signal.SIGSTOP)
    answers = [process.extract(batch, schema, ReplySelection(), "a.sqlite") for _ in range(3)]
    process.close()
    for answer in answers:
        with pytest.raises((StudioError, CancelledError)):
            answer.result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize("value", ["plain", 2**70, "\ud800"])
def test_calls_reach_the_child_and_those_that_cannot_be_sent_are_joined_here(
    process: ExtractionProcess, tmp_path: Path, value: object
) -> None:
    studio = Studio(tmp_path / "a.sqlite")
    studio.write(marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))
    reader = StudioReader(studio.path, IngestSettings())
    (batch,) = [each for each in reader.read(Cursor(), Ledger(), now=NOW, final=True) if each.traces]
    reader.close()
    batch = replace(batch, calls={MARK: recorded_call(parameters={"x": value})})
    found = process.extract(batch, "generation 2", ReplySelection(), "a.sqlite").result(60)
    assert found == extract(batch, "generation 2", ReplySelection(), "a.sqlite")
    assert b'"prompt_source":"calls"' in found.entries[0].line
    assert process.extract(batches_of("old")[1][0], "generation 1", ReplySelection(), "b").result(60).entries


@pytest.mark.slow
def test_the_child_loads_neither_settings_nor_checks(process: ExtractionProcess) -> None:
    """Loading them takes as long as the extraction of thousands of spans, and 30 MB."""
    schema, batch = long_batch()
    entries = process.extract(batch, schema, ReplySelection(), "a.sqlite").result(60).entries
    assert any("tools" in entry.excluded for entry in entries)
    loaded = " ".join(each.path for each in psutil.Process(process.pid).memory_maps())
    assert "msgspec" in loaded
    assert "pydantic" not in loaded
    assert "rpds" not in loaded  # of jsonschema
