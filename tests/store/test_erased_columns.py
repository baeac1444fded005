"""Each column that can hold a text is in the list by which an erasure goes."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import JSON, LargeBinary, Text

from flywheel.store.erased_columns import EMPTIED, RECORDS, REMOVED, RENAMED, SENTENCES, TEXTLESS
from flywheel.store.kernel import schema


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
