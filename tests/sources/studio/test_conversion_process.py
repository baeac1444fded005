"""A process that converts: it answers as conversion itself does, in order, and what ends it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from flywheel.config import IngestSettings
from flywheel.errors import StudioError
from flywheel.sources.studio import page
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.conversion import convert
from flywheel.sources.studio.conversion_process import ConversionProcess
from flywheel.sources.studio.reader import StudioReader
from flywheel.trace import Cursor, Selection
from tests.sources.studio.reading import NOW, Ledger
from tests.sources.studio.writer import DATA, NAMES

Traces = list[tuple[dict[int, bytes], bool]]


@pytest.fixture
def process() -> Iterator[ConversionProcess]:
    made = ConversionProcess()
    yield made
    made.close()


def steps_of(name: str) -> tuple[str, list[Traces]]:
    reader = StudioReader(DATA / f"{name}.sqlite", IngestSettings())
    steps = list(reader.read(Cursor(), Ledger(), now=NOW, final=True))
    schema = reader.schema
    reader.close()
    return schema, [[(trace.rows, trace.is_open) for trace in step.traces] for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_questions_on_their_way_are_answered_in_order_as_conversion_does(
    name: str, process: ConversionProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE_ROWS", 40)
    monkeypatch.setattr(reading, "STEP_ROWS", 40)
    schema, steps = steps_of(name)
    assert len(steps) > 5
    selection = Selection(exclude=frozenset({"Solver"}))
    answers = [process.convert(schema, traces, selection, "a.sqlite") for traces in steps]
    for traces, answer in zip(steps, answers, strict=True):
        assert answer.result(60) == convert(schema, traces, selection, "a.sqlite")
    assert process.waiting == 0


def test_long_questions_and_long_answers_do_not_wait_for_each_other(process: ConversionProcess) -> None:
    """Neither fits into a pipe, and nobody takes an answer before all are asked."""
    schema, steps = steps_of("new_v2")
    traces = [trace for step in steps for trace in step] * 20
    answers = [process.convert(schema, traces, Selection(), "a.sqlite") for _ in range(4)]
    alone = len(convert(schema, traces, Selection(), "a.sqlite").entries)
    assert [len(answer.result(120).entries) for answer in answers] == [alone] * 4


def test_a_process_that_was_killed_is_told(process: ConversionProcess) -> None:
    schema, steps = steps_of("old")
    os.kill(process.pid, signal.SIGKILL)
    answers = [process.convert(schema, steps[0], Selection(), "a.sqlite") for _ in range(3)]
    for answer in answers:
        with pytest.raises(StudioError, match=r"convert traces of a\.sqlite.*has died") as told:
            answer.result(60)
        assert told.value.retryable
    assert process.waiting == 0


def test_a_defect_in_conversion_costs_its_own_question(process: ConversionProcess) -> None:
    schema, steps = steps_of("old")
    bad = process.convert(schema, [({1: b"no row"}, False)], Selection(), "a.sqlite")
    good = process.convert(schema, steps[0], Selection(), "a.sqlite")
    with pytest.raises(StudioError, match="ValueError"):
        bad.result(60)
    assert good.result(60) == convert(schema, steps[0], Selection(), "a.sqlite")


def test_closing_does_not_wait_for_what_was_asked() -> None:
    schema, steps = steps_of("new_v2")
    traces = [trace for step in steps for trace in step] * 20
    process = ConversionProcess()
    answers = [process.convert(schema, traces, Selection(), "a.sqlite") for _ in range(3)]
    process.close()
    for answer in answers:
        with pytest.raises((StudioError, CancelledError)):
            answer.result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
