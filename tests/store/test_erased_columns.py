"""Each column that can hold a text is in the list by which an erasure goes."""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from sqlalchemy import JSON, LargeBinary, Text

from flywheel.store import notices
from flywheel.store.erased_columns import EMPTIED, RECORDS, REMOVED, RENAMED, SENTENCES, TEXTLESS
from flywheel.store.erasures import Kind
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import JUDGE_NOTE, ROUND_NOTE, STATE_FILE
from tests.factories.erased import erase_rows
from tests.factories.state import open_state


def test_each_column_that_can_hold_a_text_is_in_one_list() -> None:
    tables = schema.metadata.sorted_tables
    columns = {column for table in tables for column in table.c if isinstance(column.type, Text | JSON | LargeBinary)}
    removed = {column for column in columns if column.table in REMOVED}
    # What quotes an erased text is erased wherever it is, and the columns of its own rows are emptied besides.
    kept = EMPTIED.keys() | {each.column for each in SENTENCES}
    counted = Counter(column for each in (kept, RENAMED, removed, RECORDS, TEXTLESS) for column in each)
    assert {str(column) for column in columns - counted.keys()} == set(), "an erasure does not know of them"
    assert {str(column) for column in counted.keys() - columns} == set()
    assert {str(column) for column, count in counted.items() if count > 1} == set()


async def test_each_sentence_that_quotes_an_erased_text_is_erased(tmp_path: Path) -> None:
    said, other = "Where does Amélie Quist live, and since when?", "Nobody said this, and nothing of it is erased."
    async with open_state(tmp_path):
        pass
    kinds = {"events": {"kind": notices.JUDGE}, "meta": {"key": JUDGE_NOTE}, "replies": {"state": "dead"}}
    with closing(sqlite3.connect(tmp_path / STATE_FILE)) as connection, connection:
        for number, (column, text) in enumerate(
            itertools.product((each.column for each in SENTENCES), (said, other))
        ):
            if column.table is schema.meta:
                kinds["meta"]["key"] = ROUND_NOTE if text == other else JUDGE_NOTE
            # Without foreign keys, every other column may have any value.
            row = {each.name: number for each in column.table.c if not each.nullable or each.unique}
            row |= {**kinds.get(column.table.name, {}), column.name: f"it fails at: {text}"}
            names, places = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {column.table.name} ({names}) VALUES ({places})", [*row.values()])
    async with open_state(tmp_path) as store:
        await store.write(erase_rows, Kind.CONVERSATION, "a conversation", said)
    with closing(sqlite3.connect(tmp_path / STATE_FILE)) as connection:
        for column, instead, _ in SENTENCES:
            query = f'SELECT "{column.name}" FROM {column.table.name}'
            found = [text for (text,) in connection.execute(query) if isinstance(text, str)]
            assert [text for text in found if said in text] == [], column
            assert [text for text in found if other in text], f"of {column}, another one is gone, too"
            assert instead is None or instead in found, column
