"""Whatever order and rhythm spans arrive in, and wherever a reader is restarted: nothing is lost, nothing doubled."""

from __future__ import annotations

import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flywheel.config.ingest import IngestSettings
from flywheel.records.states import SkipReason
from flywheel.records.trace import Cursor, Reply
from flywheel.sources.studio import database, extraction
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.reader import StudioReader
from tests.sources.studio.reading import MUCH_LATER, NOW, QUICK, Ledger, by_id, read_all
from tests.sources.studio.writer import (
    DATA,
    NAMES,
    Studio,
    agent,
    chat,
    empty_like,
    insert,
    message,
    part,
    rows,
    span,
)


def whole(name: str) -> dict[str, Reply]:
    return by_id(read_all(DATA / f"{name}.sqlite")[0])


def test_one_reader_extracts_each_reply_once_while_spans_arrive(tmp_path: Path) -> None:
    path = empty_like("new_v1", tmp_path / "studio.sqlite")
    reader, ledger = StudioReader(path, QUICK), Ledger()
    spans = rows("new_v1")
    for first in range(0, len(spans), 7):
        insert(path, spans[first : first + 7])
        ledger.pass_(reader)
    assert ledger.extractions == len(ledger.replies) == 104, "the crashed reply is still open"
    ledger.pass_(reader, final=True)
    assert ledger.replies == whole("new_v1")
    assert ledger.extractions == 105
    reader.close()


@pytest.mark.parametrize("name", ["old", "new_v2"])
def test_a_restart_after_every_commit_changes_nothing(ledger: Ledger, name: str, tmp_path: Path) -> None:
    path = empty_like(name, tmp_path / "studio.sqlite")
    spans = rows(name)
    for first in range(0, len(spans), 13):
        insert(path, spans[first : first + 13])
        reader = StudioReader(path, QUICK)
        ledger.pass_(reader)
        reader.close()
    reader = StudioReader(path, QUICK)
    ledger.pass_(reader, final=True)
    reader.close()
    assert ledger.replies == whole(name)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_commits_passes_and_crashes_in_any_order(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A crash is a pass of which only the first batches were stored, by a reader that goes on or dies."""
    name = data.draw(st.sampled_from(NAMES))
    first = data.draw(st.sampled_from([0, 350]))
    spans = rows(name)[first : first + 100]
    path = empty_like(name, tmp_path_factory.mktemp("any") / "studio.sqlite")
    insert(path, spans)
    expected = by_id(read_all(path)[0])
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM span_table")
    database.close()
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            # As if rows were large: what ends together is told bit by bit.
            patch.setattr(reading, "COMPLETE_ROWS", data.draw(st.sampled_from([1, 5])))
            patch.setattr(extraction, "MAX_BYTES", data.draw(st.sampled_from([1, 30_000])))
        reader, ledger, at = StudioReader(path, QUICK), Ledger(), 0
        while at < len(spans):
            size = data.draw(st.integers(1, 40))
            insert(path, spans[at : at + size])
            at += size
            kept = data.draw(st.integers(0, 3))
            final = data.draw(st.booleans())
            steps = reader.read(ledger.cursor, ledger, now=NOW, final=final)
            for number, step in enumerate(steps):
                if number == kept:
                    break
                ledger.store(step, reader)
            steps.close()
            if data.draw(st.booleans()):
                reader.close()
                reader = StudioReader(path, QUICK)
        ledger.pass_(reader, final=True)
        reader.close()
    assert ledger.replies == expected


def test_a_trace_in_several_commits_is_extracted_when_it_is_whole(
    studio: Studio, reader: StudioReader, ledger: Ledger
) -> None:
    given_ = [message("user", part("q"))]
    studio.write(chat("c1", given_, "draft", parent="a1", ended=1))
    ledger.pass_(reader)
    studio.write(agent("a1", "q", "draft", parent="root", ended=2))
    ledger.pass_(reader)
    assert ledger.replies == {}
    studio.write(span("root", None, {}, ended=3), agent("a2", "q2", trace="other", ended=9))
    ledger.pass_(reader)
    assert sorted(ledger.replies) == ["a1", "a2"]
    assert ledger.replies["a1"].history == ()
    assert ledger.cursor.rowid == 4


def test_settling_waits_for_quiet_and_never_for_a_wrong_clock(studio: Studio) -> None:
    ahead = 10 * 3600
    studio.write(agent("a1", ended=5), agent("skewed", trace="t2", began=ahead, ended=ahead + 5))
    ended = NOW.replace(hour=5, minute=23, second=25)
    reader, ledger = StudioReader(studio.path, IngestSettings(settle_seconds=2)), Ledger()
    ledger.pass_(reader, now=ended + timedelta(seconds=1))
    assert ledger.replies == {} and len(ledger.open_checkpoints()) == 2
    ledger.pass_(reader, now=ended + timedelta(seconds=2))
    assert sorted(ledger.replies) == ["a1"]
    ledger.pass_(reader, now=ended + timedelta(seconds=4))
    assert sorted(ledger.replies) == ["a1", "skewed"]
    reader.close()


def test_final_does_not_wait(studio: Studio) -> None:
    studio.write(agent("a1", ended=5))
    told, _, _ = read_all(studio.path, now=NOW.replace(hour=5, minute=23, second=25), settings=IngestSettings())
    assert [reply.skip for reply in told] == [None]


def crash(path: Path) -> Studio:
    studio = Studio(path)
    given_ = [message("system", part("s")), message("user", part("q")), message("assistant", name="Solver")]
    studio.write(
        chat("c1", given_, "thinking aloud", parent="lost", trace="t1", ended=1),
        agent("done", "other", "fine", trace="t2", ended=2),
    )
    return studio


def test_an_unfinished_reply_keeps_its_place_and_is_re_extracted_when_it_arrives(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    studio = crash(path)
    reader, ledger = StudioReader(path, QUICK), Ledger()
    ledger.pass_(reader)
    assert sorted(ledger.replies) == ["done"]
    for _ in range(2):
        ledger.pass_(reader, final=True)
    assert ledger.extractions == 2, "a reader tells an unfinished reply once"
    lost = ledger.replies["lost"]
    assert lost.skip is SkipReason.UNFINISHED
    assert (lost.query, lost.agent, lost.conversation_id) == ("q", "Solver", "conversation")
    assert [m["content"] for m in lost.history] == ["s"]
    assert (ledger.cursor.rowid, [checkpoint.trace_id for checkpoint in ledger.open_checkpoints()]) == (2, ["t1"])
    reader.close()
    again = StudioReader(path, QUICK)
    ledger.pass_(again, now=MUCH_LATER)
    assert (ledger.extractions, ledger.open_checkpoints()) == (3, []), "given up in silence when it was told before"
    again.close()

    studio.write(agent("lost", "q", "at last", trace="t1", ended=30))
    reader = StudioReader(path, QUICK)
    ledger.pass_(reader)
    assert ledger.replies["lost"].skip is None
    assert ledger.replies["lost"].answer == "at last"
    assert [m["content"] for m in ledger.replies["lost"].history] == ["s"]
    assert ledger.cursor.rowid == 3
    assert ledger.changes == []
    reader.close()


def test_an_abandoned_trace_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    studio = crash(path)
    reader, ledger = StudioReader(path, QUICK), Ledger()
    ledger.pass_(reader, now=MUCH_LATER)
    assert ledger.replies["lost"].skip is SkipReason.UNFINISHED
    assert ledger.cursor.rowid == 2
    studio.write(agent("lost", "q", "very late", trace="t1", ended=30))
    ledger.pass_(reader, now=MUCH_LATER)
    assert ledger.replies["lost"].skip is None
    reader.close()


def test_agents_under_an_application_that_never_ended(studio: Studio, reader: StudioReader, ledger: Ledger) -> None:
    studio.write(agent("a1", "q", "a", parent="root"))
    ledger.pass_(reader)
    assert ledger.replies == {}, "another stage could follow"
    ledger.pass_(reader, final=True)
    ledger.pass_(reader, final=True)
    assert ledger.replies["a1"].skip is SkipReason.UNFINISHED, "told for the balance"
    assert ledger.extractions == 1
    ledger.pass_(reader, now=MUCH_LATER)
    assert ledger.replies["a1"].skip is None, "told as it is once nothing more is expected"
    assert list(ledger.replies) == ["a1"], "an application is no reply"


def test_a_late_child_re_extracts_its_reply(studio: Studio, reader: StudioReader, ledger: Ledger) -> None:
    studio.write(agent("a1", ended=2))
    ledger.pass_(reader)
    asked = [message("system", part("s")), message("user", part("What is 1 + 1?"))]
    studio.write(chat("c1", asked, parent="a1", ended=4))
    ledger.pass_(reader, final=True)
    assert (ledger.extractions, ledger.changes) == (2, ["a1"])
    assert [m["content"] for m in ledger.replies["a1"].history] == ["s"]
    assert ledger.cursor.rowid == 2


def test_a_batch_that_was_not_stored_is_extracted_again(studio: Studio, reader: StudioReader, ledger: Ledger) -> None:
    # The open trace keeps the cursor where it is: only the reader can know that nothing was stored.
    studio.write(chat("c0", [], parent="open", trace="t0"))
    ledger.pass_(reader)
    studio.write(agent("a1"))
    steps = reader.read(ledger.cursor, ledger, now=NOW)
    assert [trace.trace_id for trace in next(steps).traces] == ["trace"]
    steps.close()
    ledger.pass_(reader)
    assert list(ledger.replies) == ["a1"]
    ledger.pass_(reader)
    assert ledger.extractions == 1, "what was stored is not told again"


def test_a_trace_that_goes_on_before_its_checkpoint_is_stored_is_whole(
    studio: Studio, reader: StudioReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are read ahead of what is stored: the reader remembers the checkpoints that it has handed on."""
    pages_of(2, monkeypatch)
    studio.write(
        agent("a1", "q", "a", trace="again", ended=3),
        *(agent(f"b{number}", trace=f"other {number}") for number in range(6)),
        chat("late", [message("user", part("q"))], "a", parent="a1", trace="again", ended=2),
    )
    steps = list(reader.read(Cursor(), Ledger(), now=NOW))
    reader.close()
    found = [tuple(trace.spans) for step in steps for trace in step.traces if trace.trace_id == "again"]
    assert found == [(1,), (1, 8)]


def pages_of(rows: int, monkeypatch: pytest.MonkeyPatch, *, near: int = 1, far: int = 5_000) -> None:
    monkeypatch.setattr(database, "PAGE_ROWS", rows)
    monkeypatch.setattr(reading, "BATCH_ROWS", rows)
    # On a busy machine a page would be cut off by time.
    monkeypatch.setattr(database, "HOLD_SECONDS", 60.0)
    monkeypatch.setattr(reading, "NEAR_ROWS", near)
    monkeypatch.setattr(reading, "FAR_ROWS", far)


def test_pages_are_small_and_each_has_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    pages_of(20, monkeypatch)
    told, _, steps = read_all(DATA / "old.sqlite")
    assert [step.cursor.rowid for step in steps] == [*range(20, 466, 20), 466]
    assert max(len(step.traces) for step in steps[:-1]) <= 20
    assert by_id(told) == whole("old")


def test_pages_are_put_together_to_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pages_of(3, monkeypatch)
    monkeypatch.setattr(reading, "BATCH_ROWS", 10)
    told, _, steps = read_all(DATA / "old.sqlite")
    assert [step.rows for step in steps] == [*[12] * 38, 10]
    assert by_id(told) == whole("old")


@pytest.mark.parametrize("name", ["old", "new_v2"])
def test_history_is_read_in_pages_of_one_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trace lies across pages and is older than the patience: what still comes is in the table already."""
    pages_of(1, monkeypatch)
    told, _, steps = read_all(DATA / f"{name}.sqlite", now=MUCH_LATER, final=False)
    assert {reply.span_id: reply for reply in told} == whole(name)
    assert len(steps) == len(rows(name)) + 1


def test_a_reply_lost_long_ago_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages_of(2, monkeypatch, far=3)
    path = tmp_path / "studio.sqlite"
    studio = crash(path)
    studio.write(*(agent(f"a{number}", trace=f"later {number}") for number in range(6)))
    told, _, steps = read_all(path, now=MUCH_LATER, final=False)
    assert sorted(reply.span_id for reply in told) == sorted(["done", "lost", *(f"a{n}" for n in range(6))])
    place = [reply.span_id for reply in told].index("lost")
    assert place < 5, "long before the end"
    assert steps[-1].open_traces == 0


def test_a_parent_far_behind_its_children_is_waited_for(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Studio's rows need not lie together: another process wrote thousands between them."""
    pages_of(2, monkeypatch)
    asked = [message("system", part("s")), message("user", part("q"))]
    studio.write(
        chat("c", asked, "a", parent="far", trace="slow"),
        *(agent(f"a{number}", trace=f"other {number}") for number in range(6)),
        agent("far", "q", "a", trace="slow", ended=5),
    )
    told, _, _ = read_all(studio.path, now=MUCH_LATER, final=False)
    assert len(told) == 7
    assert [m["content"] for m in by_id(told)["far"].history] == ["s"]


def test_a_parent_too_far_behind_is_re_extracted(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    pages_of(2, monkeypatch, far=2)
    asked = [message("system", part("s")), message("user", part("q"))]
    studio.write(
        chat("c", asked, "a", parent="far", trace="slow"),
        *(agent(f"a{number}", trace=f"other {number}") for number in range(6)),
        agent("far", "q", "a", trace="slow", ended=5),
    )
    told, _, _ = read_all(studio.path, now=MUCH_LATER, final=False)
    assert [reply.skip for reply in told if reply.span_id == "far"] == [SkipReason.UNFINISHED, None]
    assert [m["content"] for m in told[-1].history] == ["s"]


def test_a_page_is_held_for_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(reading, "BATCH_ROWS", 1)
    told, _, steps = read_all(DATA / "new_v2.sqlite")
    assert [step.rows for step in steps] == [1] * 247 + [0]
    assert by_id(told) == whole("new_v2")


def test_another_file_or_schema_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / "old.sqlite", path)
    reader, ledger = StudioReader(path, QUICK), Ledger()
    ledger.pass_(reader, now=MUCH_LATER)
    first = ledger.cursor
    assert (first.generation, first.rowid) == (0, 466)

    other = tmp_path / "migrated.sqlite"
    shutil.copy(DATA / "migrated.sqlite", other)
    other.replace(path)
    ledger.pass_(reader, now=MUCH_LATER)
    second = ledger.cursor
    assert (second.generation, second.rowid) == (1, 466)
    assert second.identity != first.identity and second.fingerprint != first.fingerprint
    assert ledger.extractions == 210 and len(ledger.replies) == 105

    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE span_table ADD COLUMN extra varchar")
    database.close()
    ledger.pass_(reader, now=MUCH_LATER)
    assert ledger.cursor.generation == 2
    assert ledger.cursor.identity == second.identity
    reader.close()


def test_a_stored_cursor_goes_on_where_it_was(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / "new_v2.sqlite", path)
    reader = StudioReader(path, QUICK)
    ledger.pass_(reader, now=MUCH_LATER)
    reader.close()
    told = ledger.extractions
    for cursor in (ledger.cursor, replace(ledger.cursor, rowid=0)):
        ledger.cursor = cursor
        reader = StudioReader(path, QUICK)
        ledger.pass_(reader, now=MUCH_LATER)
        assert ledger.extractions == told, "what is remembered is passed over"
        reader.close()


def test_nothing_is_read_where_nothing_has_changed(studio: Studio, ledger: Ledger) -> None:
    studio.write(agent("a1", ended=5), agent("a2", trace="2", ended=5))
    ended = NOW.replace(hour=5, minute=23, second=25)
    reader = StudioReader(studio.path, IngestSettings(settle_seconds=2))
    assert len(ledger.pass_(reader, now=ended)) == 1
    assert ledger.pass_(reader, now=ended + timedelta(seconds=1)) == [], "neither changed nor due"
    assert reader.due_ns == int((ended + timedelta(seconds=2)).timestamp()) * 10**9
    (step,) = ledger.pass_(reader, now=ended + timedelta(seconds=2))
    assert (step.rows, len(step.traces)) == (0, 2)
    assert ledger.pass_(reader, now=MUCH_LATER) == []
    studio.write(agent("a3", trace="3", ended=9))
    assert [step.rows for step in ledger.pass_(reader, now=MUCH_LATER)] == [1]
    reader.close()


def test_a_trace_before_a_gap_of_numbers_is_extracted_whole_when_it_goes_on(
    studio: Studio, reader: StudioReader, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes thousands of spans in Studio leaves such a gap."""
    monkeypatch.setattr(database, "PAGE_ROWS", 2)
    monkeypatch.setattr(reading, "BATCH_ROWS", 2)
    given_ = [message("system", part("s")), message("user", part("q"))]
    studio.write(chat("c1", given_, "a", parent="a1", trace="t1"), agent("a1", "q", "a", trace="t1"))
    studio.write(*(agent(f"b{n}", trace=f"b{n}") for n in range(4)))
    with sqlite3.connect(studio.path) as writer:
        writer.execute("UPDATE span_table SET rowid = rowid + 100000 WHERE id LIKE 'b%'")
    writer.close()
    ledger.pass_(reader)
    assert ledger.stored["t1"].rowids == (1, 2)
    studio.write(agent("a2", "q2", "more", trace="t1", began=2, ended=3))
    ledger.pass_(reader)
    assert [m["content"] for m in ledger.replies["a1"].history] == ["s"]
    assert ledger.changes == []


def test_large_rows_are_extracted_within_bounds(
    studio: Studio, reader: StudioReader, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All traces end at once, at the end of the table; a look at all of them finds them in the same bounds."""
    monkeypatch.setattr(database, "PAGE_ROWS", 4)
    monkeypatch.setattr(reading, "COMPLETE_ROWS", 40)
    monkeypatch.setattr(extraction, "MAX_BYTES", 300_000)
    given_ = [message("user", part("q"))]
    studio.write(*(chat(f"c{n}", given_, "x" * 20_000, parent=f"a{n}", trace=f"t{n}") for n in range(40)))
    studio.write(*(agent(f"a{n}", "q", "x" * 20_000, trace=f"t{n}") for n in range(40)))
    steps = ledger.pass_(reader, final=True)
    assert [step.cursor is None for step in steps] == [True, False], "the cursor passes no trace that is to come"
    assert sorted(ledger.replies) == sorted(f"a{n}" for n in range(40))
    assert ledger.extractions == 40
    assert ledger.open_checkpoints() == []
    with sqlite3.connect(studio.path) as writer:
        writer.execute("UPDATE span_table SET attributes = replace(attributes, 'xx', 'yy')")
    writer.close()
    ledger.pass_(reader)
    ledger.rescan(reader)
    assert len(ledger.changes) == 40
    sizes = [sum(map(len, rows.values())) for rows, _ in ledger.raw]
    assert len(sizes) == 80
    for count in ledger.counts:
        assert 0 < sum(sizes[:count]) <= 300_000
        del sizes[:count]
    assert len(ledger.counts) < 40, "several at once"
