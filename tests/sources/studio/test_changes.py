"""What is changed in place is found, and what is moved is not told twice; a sweep finds what a pass cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flywheel.sources.studio import database
from flywheel.sources.studio.reader import StudioReader
from tests.sources.studio.reading import MUCH_LATER, NOW, QUICK, Ledger
from tests.sources.studio.writer import DATA, RENUMBER, Studio, agent, chat, execute, message, part


@pytest.fixture
def eight(studio: Studio) -> Studio:
    studio.write(*(agent(f"a{n}", f"What is {n}?", f"is {n}", trace=f"t{n}") for n in range(8)))
    return studio


def test_places_that_were_given_away_again_are_read(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    ledger.pass_(reader)
    execute(eight.path, "DELETE FROM span_table WHERE id IN ('a5', 'a6', 'a7')")
    eight.write(agent("new", trace="t-new"))
    ledger.pass_(reader)
    assert "new" in ledger.replies
    assert (ledger.cursor.generation, ledger.changes) == (1, [])


def test_renumbered_rows_are_extracted_once(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    ledger.pass_(reader)
    execute(eight.path, "DELETE FROM span_table WHERE id = 'a0'", *RENUMBER)
    eight.write(agent("new", trace="t-new"))
    ledger.pass_(reader)
    assert sorted(ledger.replies) == [*(f"a{n}" for n in range(8)), "new"]
    assert (ledger.extractions, ledger.cursor.generation) == (9, 1)


def test_an_older_copy_put_back_in_place_is_read_on(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    copy = eight.path.read_bytes()
    eight.write(agent("lost", trace="t-lost"))
    ledger.pass_(reader)
    eight.path.write_bytes(copy)
    eight.write(agent("new", trace="t-new"))
    ledger.pass_(reader)
    assert {"lost", "new"} <= set(ledger.replies)
    assert (ledger.extractions, ledger.changes) == (10, [])


def test_a_change_in_place_is_found_by_a_look_back(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    """Same row, same length: only its content tells."""
    ledger.pass_(reader)
    execute(eight.path, "UPDATE span_table SET attributes = replace(attributes, 'is 7', 'is 9') WHERE id = 'a7'")
    ledger.pass_(reader)
    assert ledger.changes == []
    ledger.rescan(reader, last=3)
    assert (ledger.changes, ledger.replies["a7"].answer) == (["a7"], "is 9")
    ledger.rescan(reader)
    assert ledger.changes == ["a7"], "told once"


def test_a_look_back_goes_no_further_than_it_is_asked_to(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    ledger.pass_(reader)
    execute(eight.path, "UPDATE span_table SET attributes = replace(attributes, 'is 1', 'is 9') WHERE id = 'a1'")
    ledger.rescan(reader, last=3)
    assert ledger.changes == []
    steps = ledger.rescan(reader)
    assert ledger.changes == ["a1"]
    assert sum(step.rows for step in steps) == 8


def test_a_look_back_leaves_what_no_pass_has_read(
    reader: StudioReader, ledger: Ledger, eight: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAGE_ROWS", 3)
    ledger.pass_(reader)
    eight.write(agent("new", trace="t-new"), agent("late", trace="t7", began=9, ended=12))
    steps = ledger.rescan(reader)
    assert sum(step.rows for step in steps) == 8
    assert "new" not in ledger.replies
    ledger.pass_(reader)
    assert {"new", "late"} <= set(ledger.replies)


def test_a_full_scan_finds_traces_that_were_missed(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    """As if an event, or an earlier defect, had lost it."""
    ledger.pass_(reader)
    del ledger.stored["t3"], ledger.replies["a3"]
    reader.close()
    reader = StudioReader(eight.path, QUICK)
    ledger.pass_(reader)
    assert "a3" not in ledger.replies
    ledger.rescan(reader)
    assert ledger.replies["a3"].answer == "is 3"
    reader.close()


def test_rows_that_are_gone_take_nothing_with_them(studio: Studio, reader: StudioReader, ledger: Ledger) -> None:
    asked = [message("system", part("s")), message("user", part("q"))]
    studio.write(chat("c", asked, "a", parent="a1", trace="t"), agent("a1", "q", "a", trace="t", ended=3))
    ledger.pass_(reader)
    execute(studio.path, "DELETE FROM span_table WHERE id = 'c'")
    ledger.rescan(reader)
    assert ledger.changes == [] and ledger.replies["a1"].history
    execute(studio.path, "DELETE FROM span_table")
    ledger.rescan(reader)
    ledger.pass_(reader)
    assert list(ledger.replies) == ["a1"]


def test_a_trace_that_waits_is_read_anew_when_it_is_whole(
    studio: Studio, reader: StudioReader, ledger: Ledger
) -> None:
    asked = [message("system", part("old")), message("user", part("q"))]
    studio.write(chat("c", asked, "a", parent="a1", trace="t"))
    ledger.pass_(reader)
    execute(studio.path, "UPDATE span_table SET attributes = replace(attributes, 'old', 'new')")
    studio.write(agent("a1", "q", "a", trace="t", ended=3))
    ledger.pass_(reader)
    assert [m["content"] for m in ledger.replies["a1"].history] == ["new"]
    assert ledger.extractions == 1


def test_a_restart_picks_up_the_traces_that_wait(studio: Studio, ledger: Ledger) -> None:
    asked = [message("system", part("s")), message("user", part("q"))]
    studio.write(chat("c", asked, "a", parent="a1", trace="t"))
    reader = StudioReader(studio.path, QUICK)
    ledger.pass_(reader)
    reader.close()
    studio.write(agent("a1", "q", "a", trace="t", ended=3))
    reader = StudioReader(studio.path, QUICK)
    ledger.pass_(reader)
    assert [m["content"] for m in ledger.replies["a1"].history] == ["s"]
    assert ledger.open_checkpoints() == []
    reader.close()


def test_a_genuine_migration_in_the_running_file_changes_no_reply(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / "old.sqlite", path)
    reader, ledger = StudioReader(path, QUICK), Ledger()
    ledger.pass_(reader, now=MUCH_LATER)
    path.write_bytes((DATA / "migrated.sqlite").read_bytes())
    ledger.pass_(reader, now=MUCH_LATER)
    assert reader.schema is not None and reader.schema.name == "generation 2"
    assert (ledger.changes, len(ledger.replies), ledger.cursor.generation) == ([], 105, 1)
    reader.close()


def test_a_rescan_ends_when_a_pass_starts_over(reader: StudioReader, ledger: Ledger, eight: Studio) -> None:
    ledger.pass_(reader)
    steps = reader.rescan(ledger, now=NOW)
    next(steps)
    execute(eight.path, "DELETE FROM span_table WHERE id = 'a0'", *RENUMBER)
    ledger.pass_(reader)
    assert list(steps) == []
