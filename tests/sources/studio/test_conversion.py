"""Rows of many traces at once: each reply becomes one entry, in its order, however many become entries together."""

from __future__ import annotations

import pytest

from flywheel.batch import entry_of
from flywheel.config import IngestSettings
from flywheel.sources.studio import conversion
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio.schema import named
from flywheel.trace import Cursor, Selection
from tests.sources.studio.reading import NOW, Ledger
from tests.sources.studio.writer import DATA, NAMES


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
@pytest.mark.parametrize("name", NAMES)
def test_every_reply_becomes_one_entry_in_its_order(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_AT_ONCE", at_once)
    reader = StudioReader(DATA / f"{name}.sqlite", IngestSettings())
    steps = list(reader.read(Cursor(), Ledger(), now=NOW, final=True))
    reader.close()
    traces = [(trace.rows, trace.is_open) for step in steps for trace in step.traces]
    expected = conversion.Told()
    for rows, is_open in traces:
        replies, dead = conversion.tell(
            named(reader.schema), rows, Selection(), is_open=is_open, kinds=expected.kinds
        )
        expected.entries += [entry_of(reply, "a.sqlite") for reply in replies]
        expected.dead += dead
    assert conversion.convert(reader.schema, traces, Selection(), "a.sqlite") == expected
    assert len(expected.entries) > 20
