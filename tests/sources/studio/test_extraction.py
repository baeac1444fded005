"""Rows of many traces at once: each reply becomes one entry, in its order, whatever the size of the groups."""

from __future__ import annotations

from collections import Counter

import pytest

from flywheel.records.task import Batch, entry_of
from flywheel.records.trace import DeadRow, ReplySelection
from flywheel.sources.spans import replies
from tests.sources.studio.reading import raw_traces
from tests.sources.studio.writer import DATA, NAMES


@pytest.mark.parametrize("group", [1, 7, 10_000])
@pytest.mark.parametrize("name", NAMES)
def test_every_reply_becomes_one_entry_in_its_order(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_GROUP", group)
    schema, traces = raw_traces(DATA / f"{name}.sqlite")
    entries, dead, kinds = [], list[DeadRow](), Counter[str]()
    for rows, is_open in traces:
        own, bad = replies.replies_of(schema, rows, ReplySelection(), is_open=is_open, kinds=kinds)
        entries += [entry_of(reply, "a.sqlite") for reply in own]
        dead += bad
    expected = Batch(None, entries=tuple(entries), dead=tuple(dead), kinds=dict(kinds))
    assert replies.extract(traces, schema, ReplySelection(), "a.sqlite") == expected
    assert len(entries) > 20
