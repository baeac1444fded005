"""Each complete line once, however the file is written, torn, rotated, truncated and rewritten."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel.errors import SourceError
from flywheel.records.privacy import PrivateNames
from flywheel.records.trace import Cursor
from flywheel.sources.jsonl import reader as line_reader
from flywheel.sources.jsonl.reader import MAX_LINE, JsonlReader, files_of, unread_in
from flywheel.sources.jsonl.record import entry_of_line
from tests.cases import for_each
from tests.sources.jsonl.reading import Stored, asked, line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


@pytest.fixture
def stored(path: Path) -> Stored:
    return Stored(path)


@pytest.fixture
def reader(path: Path) -> Iterator[JsonlReader]:
    reader = JsonlReader(path)
    yield reader
    reader.close()


def append(path: Path, *parts: bytes) -> None:
    with path.open("ab") as out:
        out.write(b"".join(parts))


def identity(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


def test_what_is_appended_comes_once(path: Path, reader: JsonlReader, stored: Stored) -> None:
    append(path, line(1), line(2))
    assert stored.read(reader) == asked(1, 2)
    assert (reader.schema, identity(path)) == ("jsonl", stored.cursor.identity)
    assert stored.cursor.rowid == path.stat().st_size
    assert stored.read(reader) == []
    append(path, line(3))
    assert stored.read(reader) == asked(3)
    assert stored.read() == []
    assert stored.cursor.generation == 0
    assert reader.longest_read_ms > 0


def test_a_pass_over_an_unchanged_file_brings_nothing_to_store(
    path: Path, reader: JsonlReader, stored: Stored
) -> None:
    append(path, line(1))
    stored.read(reader)
    assert list(reader.read(stored.cursor)) == []


def test_an_empty_file_is_known_by_its_identity(path: Path, reader: JsonlReader, stored: Stored) -> None:
    path.touch()
    assert stored.read(reader) == []
    assert stored.cursor.identity == identity(path)
    assert list(reader.read(stored.cursor)) == []


def test_a_line_without_a_line_end_waits_and_is_told_about(path: Path, reader: JsonlReader, stored: Stored) -> None:
    append(path, line(1), line(2).strip())
    assert stored.read(reader) == asked(1)
    assert stored.warnings == []
    assert stored.read(reader) == []
    assert "without a line end" in stored.warnings[0]
    append(path, b"\n")
    assert stored.read(reader) == asked(2)


def test_a_final_pass_takes_a_last_line_that_is_whole(path: Path, stored: Stored) -> None:
    append(path, line(1), line(2).strip())
    assert stored.read(final=True) == asked(1, 2)
    append(path, b"\n", line(3)[:20])
    assert stored.read(final=True) == []
    append(path, line(3)[20:])
    assert stored.read(final=True) == asked(3)
    assert (stored.dead, stored.cursor.generation) == ([], 0)


def test_pages_are_small_and_each_has_its_cursor(path: Path, reader: JsonlReader) -> None:
    append(path, *(line(number) for number in range(1200)))
    batches = list(reader.read(Stored(path).cursor))
    assert [len(batch.entries) for batch in batches] == [500, 500, 200]
    again = Stored(path)
    again.take(batches[0])
    again.entries.clear()
    assert again.read() == asked(*range(500, 1200))


def test_a_page_ends_early_when_its_lines_are_long(path: Path, reader: JsonlReader) -> None:
    append(path, *(line(number, note="x" * (1 << 20)) for number in range(12)))
    batches = list(reader.read(Stored(path).cursor))
    assert [len(batch.entries) for batch in batches] == [4, 4, 4]


def test_a_file_that_was_moved_away_is_read_to_its_end_first(path: Path, reader: JsonlReader, stored: Stored) -> None:
    append(path, line(1))
    stored.read(reader)
    append(path, line(2), line(3)[:-1])
    path.rename(path.with_suffix(".1"))
    with pytest.raises(SourceError, match="No such file"):
        stored.read(reader)
    append(path.with_suffix(".1"), b"\n")
    append(path, line(4))
    assert stored.read(reader) == asked(3, 4)
    assert [entry.key for entry in stored.entries] == list(dict.fromkeys(entry.key for entry in stored.entries))
    assert len(stored.entries) == 4
    assert stored.cursor.generation == 1


def test_what_a_moved_file_leaves_torn_is_a_dead_row(path: Path, reader: JsonlReader, stored: Stored) -> None:
    append(path, line(1), line(2)[:12])
    stored.read(reader)
    path.rename(path.with_suffix(".1"))
    append(path, line(3))
    assert stored.read(reader) == asked(3)
    assert [row.excerpt for row in stored.dead] == [line(2)[:12].decode()]


def test_a_file_that_is_gone_for_a_while_goes_on_where_it_was(
    path: Path, reader: JsonlReader, stored: Stored
) -> None:
    append(path, line(1), line(2)[:12])
    stored.read(reader)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(SourceError) as raised:
        stored.read(reader)
    assert raised.value.retryable
    path.with_suffix(".away").rename(path)
    append(path, line(2)[12:])
    assert stored.read(reader) == asked(2)
    assert (stored.dead, stored.cursor.generation) == ([], 0)


def test_a_deleted_file_is_let_go_of(path: Path, reader: JsonlReader, stored: Stored) -> None:
    append(path, line(1))
    stored.read(reader)
    append(path, line(2))
    path.unlink()
    with pytest.raises(SourceError):
        stored.read(reader)
    assert [entry.key for entry in stored.entries] == [entry.key for entry in stored.entries[:2]]
    assert not [
        fd for fd in Path("/proc/self/fd").iterdir() if "(deleted)" in _target(fd) and path.name in _target(fd)
    ]
    append(path, line(3))
    assert stored.read(reader) == asked(3)


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize("again", [True, False], ids=["same reader", "new reader"])
def test_rotation_truncation_and_rewriting_start_over(
    path: Path, reader: JsonlReader, stored: Stored, *, again: bool
) -> None:
    own = reader if again else None
    append(path, line(1), line(2))
    stored.read(own)
    # Truncated in place, as logrotate's copytruncate does, and shorter than before.
    path.write_bytes(line(3))
    assert stored.read(own) == asked(3)
    # Rewritten in place, and longer than before.
    path.write_bytes(line(4) + line(5) + line(6))
    assert stored.read(own) == asked(4, 5, 6)
    # Rewritten in place with the same length and the same last line.
    path.write_bytes(line(7) + line(5) + line(6))
    assert stored.read(own) == asked(7, 5, 6)
    # Rewritten in place, with the same first line.
    path.write_bytes(line(7) + line(6) + line(5) + line(6))
    assert stored.read(own) == asked(7, 6, 5, 6)
    # Replaced by another file.
    path.with_suffix(".new").write_bytes(line(8) + line(5) + line(6))
    path.with_suffix(".new").replace(path)
    assert stored.read(own) == asked(8, 5, 6)
    path.write_bytes(b"")
    assert stored.read(own) == []
    append(path, line(9))
    assert stored.read(own) == asked(9)
    assert stored.cursor.generation == 6


def refilled(path: Path, *parts: bytes, seconds: int = 0) -> None:
    """Fill a file in place, so many seconds after its last change."""
    before = path.stat()
    with path.open("rb+") as file:
        file.write(b"".join(parts))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + seconds * 10**9))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("again", [True, False], ids=["same reader", "new reader"])
def test_a_file_that_is_refilled_with_lines_of_equal_length_is_another(
    path: Path, reader: JsonlReader, stored: Stored, *, again: bool
) -> None:
    own = reader if again else None

    def long(number: int) -> bytes:
        # As prompt and tools do, both ends of all lines are the same.
        return line(5, question=f"{'x' * 5_000}{number}{'x' * 5_000}")

    def read() -> list[str]:
        return [question.strip("x") for question in stored.read(own)]

    append(path, long(1))
    assert read() == ["1"]
    refilled(path, long(2))
    assert read() == ["2"]
    # Only the time tells that a line in the middle is another.
    append(path, long(3), long(4))
    assert read() == ["3", "4"]
    assert read() == []
    refilled(path, long(2), long(5), long(4), seconds=7)
    assert read() == ["2", "5", "4"]
    assert read() == []
    # What is appended in the same second is no reason to begin anew.
    append(path, line(6))
    assert stored.read(own) == asked(6)
    assert stored.cursor.generation == 2


def log_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "NUL" in message]


@pytest.mark.parametrize("begin", [len(line(1)) + 5, len(line(1))], ids=["within a line", "where one begins"])
def test_a_hole_is_read_when_it_is_filled(path: Path, reader: JsonlReader, stored: Stored, begin: int) -> None:
    whole = line(1) + line(2) + line(3) + line(4)
    end = len(whole) - len(line(4)) - 5
    path.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
    assert stored.read(reader) == asked(1)
    assert ["in line 2: this part of the file is not written yet" in each for each in stored.warnings] == [True]
    assert stored.read(reader) == []
    # Another part of it.
    path.write_bytes(whole[:begin] + bytes(9) + whole[begin + 9 :])
    assert stored.read(reader) == []
    path.write_bytes(whole)
    assert stored.read(reader) == asked(2, 3, 4)
    assert stored.dead == []


def test_a_hole_that_is_never_filled_is_left_out(
    path: Path, reader: JsonlReader, stored: Stored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append(path, line(1), bytes(100))
    assert stored.read(reader) == asked(1)
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr(line_reader, "time", clock)
    append(path, line(2), line(3)[:9])
    assert stored.read(reader) == []
    now += line_reader.UNWRITTEN_SECONDS - 1
    append(path, line(3)[9:])
    assert stored.read(reader) == []
    now += 2
    assert log_of(caplog) == []
    assert stored.read(reader) == asked(2, 3)
    [logged] = log_of(caplog)
    assert logged.startswith(f"{path}: 100 NUL bytes in line 2 were left out")
    # Without a line behind it, it may always be written.
    append(path, bytes(50))
    for _ in range(2):
        stored.warnings.clear()
        assert stored.read(reader) == []
        assert ["50 NUL bytes" in each for each in stored.warnings] == [True]
        now += 10 * line_reader.UNWRITTEN_SECONDS
    assert len(log_of(caplog)) == 1
    assert stored.dead == []


def test_a_program_that_goes_on_at_its_old_place_after_a_truncation_loses_nothing(
    path: Path, reader: JsonlReader, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    with path.open("wb", buffering=0) as out:
        out.write(line(1) + line(2))
        assert stored.read(reader) == asked(1, 2)
        os.truncate(path, 0)
        assert stored.read(reader) == []
        out.write(line(3))
        assert stored.read(reader) == asked(3)
        assert [str(len(line(1) + line(2))) in logged for logged in log_of(caplog)] == [True]
        out.write(line(4))
        assert stored.read(reader) == asked(4)
        # A hole may be longer than any line, and than memory.
        os.truncate(path, 0)
        out.seek(3 * MAX_LINE)
        out.write(line(5))
        assert stored.read(reader) == asked(5)
    assert stored.dead == []


def test_a_file_that_was_moved_away_is_not_waited_for(
    path: Path, reader: JsonlReader, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    append(path, line(1))
    stored.read(reader)
    append(path, bytes(10), line(2), b"torn\0\0\0\n")
    path.rename(path.with_suffix(".1"))
    append(path, line(3))
    assert stored.read(reader) == asked(2, 3)
    assert [row.excerpt.replace("\0", "") for row in stored.dead] == ["torn"]
    assert len(log_of(caplog)) == 2


def test_the_same_line_is_the_same_entry_but_for_the_time_of_reading(path: Path) -> None:
    append(path, line(1))
    first, second = Stored(path), Stored(path)
    first.read()
    second.read()
    [one], [two] = first.entries, second.entries
    assert (one.key, one.content, one.trace_id) == (two.key, two.content, two.trace_id)


POISON = [
    b"{",
    b"nonsense",
    b"7",
    b"[]",
    b"null",
    b'{"question": "q", "answer": NaN}',
    b"\xff\xfe",
    b'{"question": "\xff", "answer": "a"}',
    b'{"question": ["q"], "answer": "a"}',
    b'{"question": "q", "answer": {"text": "a"}}',
    b'{"question": "q", "answer": true}',
    b'{"prompt": 7}',
    b'{"messages": "hello"}',
    b'{"messages": ["hello"]}',
    b'{"messages": [{"content": "no role"}]}',
    b'{"messages": [{"role": "user", "content": 7}]}',
    b'{"messages": [{"role": "user", "content": [7]}]}',
    b'{"question": "q", "answer": "a", "metadata": []}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
]


def test_a_bad_line_costs_itself(path: Path, stored: Stored) -> None:
    append(path, line(1), *(bad + b"\n" + line(place + 2) for place, bad in enumerate(POISON)))
    assert stored.read() == asked(*range(1, len(POISON) + 2))
    assert len(stored.dead) == len(POISON)
    assert len({row.span_id for row in stored.dead}) == len(POISON)
    assert [row.span_id.partition(" (")[0] for row in stored.dead] == [
        f"line {2 * n}" for n in range(1, len(POISON) + 1)
    ]
    assert all(row.error for row in stored.dead)
    assert all(len(row.excerpt) <= 2000 for row in stored.dead)
    again = Stored(path)
    again.read()
    assert again.dead == stored.dead


def test_a_line_that_is_nested_very_deeply_holds_up_no_other(path: Path, stored: Stored) -> None:
    deep = b'{"question": "q", "answer": "a", "tools": [{"f": ' + b"[" * 980 + b"]" * 980 + b"}]}\n"
    path.write_bytes(line(1) + deep + line(2))
    assert stored.read() == asked(1, 2)
    assert [row.error for row in stored.dead] == ["it is nested more than 254 levels deep"]


def test_a_line_that_breaks_the_reading_holds_up_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, stored: Stored
) -> None:
    def breaks(text: bytes, *given: Any) -> Any:
        if b'"poison"' in text:
            raise KeyError("x")
        return entry_of_line(text, *given)

    monkeypatch.setattr("flywheel.sources.jsonl.reader.entry_of_line", breaks)
    path.write_bytes(line(1) + b'"poison"\n' + line(2))
    assert stored.read() == asked(1, 2)
    assert [row.error for row in stored.dead] == ["KeyError: 'x'. This is a defect; please report it."]


def test_another_bad_line_at_the_same_place_is_another_dead_row(path: Path, stored: Stored) -> None:
    append(path, b"nonsense\n")
    stored.read()
    path.write_bytes(b"hokum\n")
    stored.read()
    assert len({row.span_id for row in stored.dead}) == 2


OTHERS = '"tools": [{"user_id": "x"}], "user_id": "y"'


@for_each(
    "text, whose",
    [
        (f'{{"messages": 5, "metadata": {{"user_id": 7, "conversation_id": "a\\"é"}}, {OTHERS}}}', ('a"é', "7")),
        ('{"metadata": {"conversation_id": "a\\"\\ud83e\\udd8a", "user_id": "ann"', ('a"🦊', "ann")),
        ('{"main_query": "said: \\"user_id\\": \\"x\\"", "metadata": {"user_id": "cut o', ("", "")),
        ("no JSON", ("", "")),
        ("[7]", ("", "")),
        ('{"metadata": 7}', ("", "")),
    ],
)
def test_a_bad_line_belongs_to_whom_it_names(text: str, whose: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{text}\n")
    stored = Stored(path)
    stored.read()
    [row] = stored.dead
    assert (row.conversation_id, row.user) == whose
    # In another place it has another name, and stands for the same trace.
    path.write_text(f"\n{text}\n")
    again = Stored(path)
    again.read()
    assert again.dead[0].span_id != row.span_id
    assert again.dead[0].trace_id == row.trace_id != ""


def test_nothing_is_kept_of_a_bad_line_of_somebody_who_is_excluded(path: Path, stored: Stored) -> None:
    append(path, b'{"messages": 5, "metadata": {"user_id": "ann", "conversation_id": "c"}}\n')
    for names in (PrivateNames(users=frozenset({"ann"})), PrivateNames(conversations=frozenset({"c"}))):
        reader = JsonlReader(path, private=names)
        stored.cursor = Cursor()
        stored.read(reader)
        reader.close()
        row = stored.dead.pop()
        assert (row.error, row.excerpt) == ("it cannot be read, and is private", "")
        assert (row.conversation_id, row.user) == ("", "")


def test_a_line_of_100_mb_costs_itself_and_no_memory(path: Path, reader: JsonlReader, stored: Stored) -> None:
    import tracemalloc

    piece = b"x" * (1 << 20)
    append(path, line(1), b'{"question": "', *([piece] * 100))
    tracemalloc.start()
    try:
        assert stored.read(reader) == asked(1)
        assert stored.read(reader) == []
        assert "without a line end" in stored.warnings[0]
        append(path, b'"}\n', line(2))
        assert stored.read(reader) == asked(2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.error for row in stored.dead] == ["it is longer than 16 MiB"]
    assert peak < 6 * MAX_LINE
    assert stored.read() == []
    assert stored.cursor.generation == 0


def test_a_long_line_that_waits_is_not_looked_through_again(
    path: Path, reader: JsonlReader, monkeypatch: pytest.MonkeyPatch, stored: Stored
) -> None:
    monkeypatch.setattr(line_reader, "MAX_LINE", 1000)
    append(path, line(1), b"y" * 50_000)
    stored.read(reader)

    def forbidden(self: object, start: int) -> Iterator[object]:
        raise AssertionError("read again")

    with monkeypatch.context() as during:
        during.setattr(line_reader.JsonlFile, "lines", forbidden)
        stored.read(reader)
    append(path, b"\n", line(2))
    assert stored.read(reader) == asked(2)
    assert len(stored.dead) == 1


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_trouble(path: Path, stored: Stored) -> None:
    append(path, b"\xef\xbb\xbf", line(1).replace(b"\n", b"\r\n"), b"\n   \n", line(2))
    assert stored.read() == asked(1, 2)
    assert stored.dead == []


def test_the_files_of_a_directory(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json", ".hidden.jsonl", "b.jsonl.1"):
        (tmp_path / name).touch()
    assert unread_in(tmp_path) == ""
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("C.JSONL", "d.ndjson", "e.NDJson"):
        (tmp_path / name).touch()
    assert [file.name for file in files_of(tmp_path)] == ["C.JSONL", "a.jsonl", "b.jsonl", "d.ndjson", "e.NDJson"]
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "nothing")
    for number in range(5):
        (tmp_path / f"{number}.jsonl.GZ").touch()
    assert unread_in(tmp_path).startswith(
        "not read: 5 compressed files (0.jsonl.GZ, 1.jsonl.GZ, 2.jsonl.GZ, …), 1 subfolder (folder.jsonl), "
        "1 link to nothing (linked.jsonl). Only"
    )
    assert files_of(tmp_path / "c.json") == [tmp_path / "c.json"]
    with pytest.raises(SourceError, match=r"nowhere.*No such file.*Correct the source's path"):
        files_of(tmp_path / "nowhere")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        reader = JsonlReader(path)
        with pytest.raises(SourceError):
            list(reader.read(Stored(path).cursor))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_complete_line_comes_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Lines and nonsense are appended torn at any byte, files are rotated, readers die with batches not stored."""
    path = tmp_path_factory.mktemp("lines") / "tasks.jsonl"
    kinds = data.draw(st.lists(st.sampled_from(["task", "unicode", "bad", "blank"]), max_size=30))
    lines = []
    for number, kind in enumerate(kinds, start=1):
        lines.append(
            {
                "task": line(number),
                "unicode": line(number, note="é😀\u2028\x85"),
                "bad": b"bad \xff" + str(number).encode() + b"\n",
                "blank": b" \r\n",
            }[kind]
        )
    whole = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    rotations = set(data.draw(st.lists(st.integers(1, 12), max_size=2)))
    pages = data.draw(st.sampled_from([1, 3, 500]))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stored, reader = Stored(path), JsonlReader(path)
    path.touch()
    with pytest.MonkeyPatch.context() as during:
        during.setattr(line_reader, "PAGE_LINES", pages)
        during.setattr(line_reader, "_BLOCK", data.draw(st.sampled_from([1, 7, 64, 1 << 20])))
        for place, piece in enumerate(pieces):
            ended = path.read_bytes().endswith(b"\n")
            if place in rotations and ended:
                # A reader that lives through a rotation has the old file open; one that does not has read it.
                stored.read(reader)
                path.rename(path.with_name(f"{place}.old"))
                path.touch()
            append(path, piece)
            match data.draw(st.sampled_from(["wait", "read", "die", "restart"])):
                case "read":
                    stored.read(reader)
                case "die":
                    for batch in reader.read(stored.cursor):
                        if data.draw(st.booleans()):
                            break
                        stored.take(batch)
                    reader.close()
                    reader = JsonlReader(path)
                    stored.read(reader)
                case "restart":
                    stored.read(reader)
                    reader.close()
                    reader = JsonlReader(path)
        stored.read(reader)
    reader.close()
    tasks = [place + 1 for place, kind in enumerate(kinds) if kind in ("task", "unicode")]
    found = [entry.key for entry in stored.entries]
    assert len(found) == len(tasks)
    assert len(set(found)) == len(tasks)
    assert [b"bad" in row.excerpt.encode() for row in stored.dead] == [True] * kinds.count("bad")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b'{"question": "q", "answer": "a"}\n' * 50, mtime=0), "gzip"),
        (bz2.compress(b'{"question": "q", "answer": "a"}\n' * 50), "bzip2"),
        (lzma.compress(b'{"question": "q", "answer": "a"}\n' * 50), "xz"),
        ('{"question": "q", "answer": "a"}\n'.encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_in_another_format_is_one_error_and_read_once_it_is_lines(
    path: Path, content: bytes, what: str, stored: Stored
) -> None:
    path.write_bytes(content)
    reader = JsonlReader(path)
    for _ in range(2):
        with pytest.raises(SourceError, match=what) as refused:
            stored.read(reader)
    assert refused.value.condition == "not lines"
    assert (stored.entries, stored.dead) == ([], [])
    path.write_text('{"question": "q", "answer": "a"}\n')
    assert stored.read(reader) == ["q"]
    reader.close()
