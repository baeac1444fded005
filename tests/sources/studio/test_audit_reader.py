"""A look at a whole database holds a few traces at a time, fewer where their rows are large."""

from __future__ import annotations

import pytest

from flywheel.sources.studio import audit_reader
from flywheel.sources.studio.audit_reader import AuditReader
from tests.sources.studio.writer import Studio, agent


@pytest.mark.parametrize(("letters", "groups"), [(10, range(2, 8)), (20_000, range(20, 120))])
def test_groups_are_smaller_where_rows_are_large(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, letters: int, groups: range
) -> None:
    monkeypatch.setattr(audit_reader, "_FIRST_ROWS", 10)
    monkeypatch.setattr(audit_reader, "_BYTES_AT_ONCE", 100_000)
    studio.write(*(agent(f"a{number}", "q", "x" * letters, trace=f"t{number}") for number in range(100)))
    sizes = []
    names: list[str] = []
    with AuditReader(studio.path) as looked:
        looked.list_rows()
        for group in looked.groups():
            names += group.traces
            sizes.append(sum(len(row) for rows in group.traces.values() for row in rows.values()))
    assert names == [f"t{number}" for number in range(100)]
    assert len(sizes) in groups
    assert max(sizes[1:]) < 130_000
