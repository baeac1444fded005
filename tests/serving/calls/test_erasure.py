"""Erased calls: nothing of them is left in the files, and every other call is as it was, after kill -9 as well."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.conversations import as_header
from flywheel.serving.calls import call_log
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.call_log_page import page_json, read_page
from tests import warm
from tests.factories.call_log import (
    assert_gone,
    assert_uses_are_right,
    bytes_of,
    call,
    compact,
    conversation,
    only_of,
    stored,
)  # fmt: skip
from tests.waiting import wait_for


def random_calls(seed: int, shape: list[tuple[int, int, int]]) -> list[RecordedCall]:
    """Calls of conversations that share beginnings: for each call its conversation, messages and the size of each."""
    found = []
    for at, (of, messages, size) in enumerate(shape):
        texts = [random.Random(f"{seed} {of % 2 if place < 2 else of} {place}") for place in range(messages)]
        body = {
            "model": "agent",
            "messages": [{"role": "user", "content": each.randbytes(size * 37 // 2).hex()} for each in texts],
        }
        response = random.Random(f"{seed} {at} answer").randbytes(size * 29).hex().encode()
        found.append(call(f"fw-{at}", compact(body), response=response, ended_ns=at + 1))
    return found


shapes = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from([1, 3, 20, 150])), min_size=1, max_size=25
)


@pytest.mark.slow
@given(st.data(), shapes, st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_nothing_of_erased_calls_is_left_and_all_others_are_as_they_were(
    data: st.DataObject, shape: list[tuple[int, int, int]], seed: int
) -> None:
    calls = random_calls(seed, shape)
    left, gone = list(calls), []
    with tempfile.TemporaryDirectory() as folder, CallLog(path := Path(folder) / "calls.db") as log:
        for each in calls:
            log.append([each])
        oldest = data.draw(st.integers(0, len(calls)))
        log.prune(oldest, 10**9)
        left = [each for each in left if each.ended_ns >= oldest]
        for _ in range(data.draw(st.integers(1, 3))):
            some = data.draw(st.lists(st.sampled_from(left), unique_by=lambda each: each.request_id)) if left else []
            assert log.erase(each.request_id for each in some) == len(some)
            left = [each for each in left if each not in some]
            gone += some
            assert stored(log) == left
            assert_uses_are_right(log)
        assert log.erase([each.request_id for each in gone]) == 0
        assert log.purge()
        assert_gone(path, only_of(gone, left), left)
        # Pruning goes on with what is left.
        before = data.draw(st.integers(0, len(calls) + 1))
        assert log.prune(before, 10**9) == len([each for each in left if each.ended_ns < before])
        left = [each for each in left if each.ended_ns >= before]
        assert stored(log) == left
        assert_uses_are_right(log)
        log.append(calls)
        assert {each.request_id for each in stored(log)}.isdisjoint(each.request_id for each in gone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 11, 14])
def test_copies_that_sqlite_leaves_when_it_moves_rows_are_gone(tmp_path: Path, seed: int) -> None:
    """Rows move when neighbours are removed, and leave bytes in unused parts of pages: in these cases, as SQLite 3.40
    does it, those of rows that are removed later."""
    calls = random_calls(seed, [(at, 1, at * 7 % 60 + 1) for at in range(60)])
    chosen = random.Random(seed)
    first = chosen.sample(calls, 30)
    second = chosen.sample([each for each in calls if each not in first], 20)
    with CallLog(path := tmp_path / "calls.db") as log:
        log.append(calls)
        for some in (first, second):
            log.erase(each.request_id for each in some)
        assert log.purge()
        kept = stored(log)
    assert_gone(path, only_of([*first, *second], kept), kept)


def test_the_file_is_as_small_as_if_the_calls_had_never_been(tmp_path: Path) -> None:
    one, other = conversation(20, 1), conversation(20, 2)
    with CallLog(tmp_path / "calls.db") as log, CallLog(tmp_path / "other.db") as expected:
        log.append([each for pair in zip(one, other, strict=True) for each in pair])
        expected.append(other)
        assert log.erase(each.request_id for each in one) == 20
        assert log.purge()
        assert log.live_bytes() < 1.1 * expected.live_bytes()
        assert stored(log) == other
        assert log.older(10) == 20


def test_an_erased_call_never_comes_back(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log, CallLog(tmp_path / "calls.db") as second:
        log.append([call("a"), call("b")])
        # "c" is still in a queue, or in another copy of the log.
        assert second.erase(["a", "c", "a"]) == 1
        assert log.append([call("a"), call("c"), call("d")]) == 1
        assert [each.request_id for each in stored(log)] == ["b", "d"]
        assert log.erased(["a", "b", "c", "d"]) == {"a", "c"}


def test_a_message_that_is_there_twice_stays_as_long_as_a_call_has_it(tmp_path: Path) -> None:
    again = {"role": "user", "content": "again"}
    one, two = (call(f"fw-{at}", compact({"messages": [again] * (3 + at)})) for at in range(2))
    with CallLog(tmp_path / "calls.db") as log:
        log.append([one, two])
        assert log.erase([two.request_id]) == 1
        assert stored(log) == [one]
        assert_uses_are_right(log)
        assert log.prune(10, 10**9) == 1
        assert_uses_are_right(log)


@pytest.mark.slow
def test_a_server_goes_on_recording_while_calls_are_erased(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    before, added = conversation(300, 1), conversation(60, 2)
    with CallLog(path) as log, CallLog(path) as server:
        log.append(before)

        def record() -> None:
            for each in added:
                server.append([each])

        thread = threading.Thread(target=record)
        thread.start()
        assert log.erase(each.request_id for each in before) == 300
        thread.join()
        assert stored(log) == added
        assert_uses_are_right(log)


def test_a_file_is_not_purged_while_others_read_an_older_state(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    gone = conversation(5)
    with CallLog(path) as log, CallLog(path) as reader:
        log.append(gone)
        with reader.reading():
            assert len(stored(reader)) == 5
            log.erase(each.request_id for each in gone)
            assert not log.purge(0)
            assert len(stored(reader)) == 5
        assert log.purge(0)
        assert_gone(path, only_of(gone, []), [])


def test_a_large_file_is_compacted_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append(calls := conversation(5))
        monkeypatch.setattr(call_log, "COMPACTED_AT_ONCE_BYTES", 0)
        log.erase(["fw-0-1"])
        assert log.purge()
        assert log.purge()
        log.erase(["fw-0-2"])
        assert not log.purge()
        # What was removed is overwritten at once.
        assert zlib.compress(calls[2].response, 1)[2:-4] not in bytes_of(tmp_path / "calls.db")
        monkeypatch.setattr(call_log, "COMPACT_NS", 0)
        assert log.purge()


def test_a_page_says_how_many_of_its_numbers_were_erased(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([call(f"fw-{at}", ended_ns=at) for at in range(1, 11)])
        log.erase(["fw-4", "fw-5", "fw-9", "fw-10"])
        assert [read_page(page_json(log, after, 9, 10**9), after).erased for after in (0, 3, 4, 7, 8, 9)] == [
            0, 2, 1, 0, 2, 1,
        ]  # fmt: skip
        assert read_page(page_json(log, 8, 9, 10**9), 8).calls == []
        log.prune(7, 10**9)
        page = read_page(page_json(log, 0, 9, 10**9), 0)
        assert ([number for number, _ in page.calls], page.erased) == ([7, 8], 2)
        older = json.loads(page_json(log, 8, 9, 10**9))
        with pytest.raises(ValueError, match="contradict"):
            read_page(json.dumps({**older, "erased": 1}), 8)


ERASER = """
import sys
from pathlib import Path
from flywheel.serving.calls.call_log import CallLog
from tests.factories.call_log import conversation
log = CallLog(Path(sys.argv[1]), busy_seconds=60)
print("ready", flush=True)
log.erase([each.request_id for seed in range(0, 40, 2) for each in conversation(30, seed)])
log.purge()
"""


@pytest.mark.slow
def test_what_kill_9_leaves_of_an_erasure_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls.db"
    gone = [each for seed in range(0, 40, 2) for each in conversation(30, seed)]
    kept = [each for seed in range(1, 40, 2) for each in conversation(30, seed)]
    with CallLog(path) as log:
        log.append([*gone[:300], *kept, *gone[300:]])
    eraser = warm.Popen([sys.executable, "-c", ERASER, str(path)], stdout=subprocess.PIPE)
    try:
        assert eraser.stdout is not None
        assert eraser.stdout.readline() == b"ready\n"
        with CallLog(path) as log:
            wait_for(lambda: log.live_bytes() and len(log.erased(gone[0].request_id for _ in (1,))), "an erasure")
    finally:
        os.kill(eraser.pid, signal.SIGKILL)
        eraser.wait()
        if eraser.stdout is not None:
            eraser.stdout.close()
    every = {each.request_id: each for each in [*kept, *gone]}
    with CallLog(path) as log:
        found = stored(log)
        assert all(each == every[each.request_id] for each in found)
        assert_uses_are_right(log)
        assert log.erase(each.request_id for each in gone) == len(found) - len(kept)
        assert stored(log) == kept
        assert log.purge()
        assert_gone(path, only_of(gone, kept)[::100], kept)


NAMED = {"conversation": "c-1", "user": "ana"}


def test_calls_are_found_by_conversation_and_user(tmp_path: Path) -> None:
    long = "é" * 9
    with CallLog(tmp_path / "calls.db") as log:
        log.append([
            call("a", **NAMED), call("b", conversation="c-2", user="bo"), call("c"),
            call("d", conversation=as_header(long)),
        ])  # fmt: skip
        assert log.ids_of(["c-1"], []) == log.ids_of([], ["ana"]) == ["a"]
        assert log.ids_of(["c-2", long], ["ana", "a"]) == ["a", "b", "d"]
        assert log.ids_of([""], [""]) == []
        assert log.find(["a"])["a"] == call("a", **NAMED)
        page = page_json(log, 0, 9, 10**9)
        assert [each for _, each in read_page(page, 0).calls] == stored(log)
        log.erase(["a"])
        assert log.ids_of(["c-1"], ["ana"]) == []


def test_later_calls_that_resend_a_call_are_found(tmp_path: Path) -> None:
    one, other = conversation(4, 1), conversation(4, 2)
    with CallLog(tmp_path / "calls.db") as log:
        log.append([each for pair in zip(one, other, strict=True) for each in pair])
        log.append([call("text", b'{"input": "hi"}'), call("again", b'{"input": "hi"}'), call("cut", b"{")])
        assert log.resending([one[1].request_id, other[3].request_id, "text", "cut", "nobody"]) == {
            one[1].request_id: [each.request_id for each in one[2:]]
        }
        # White space between the values, and the same last message after another history.
        sent = json.loads(one[1].request)["messages"]
        other = [*sent[:-2], {"role": "assistant", "content": "x"}, sent[-1]]
        log.append([
            call("spaced", b'{"messages" : [' + b" ,\n".join(compact(each) for each in sent) + b" ] }"),
            call("other", compact({"messages": other})), call("shorter", compact({"messages": sent[1:]})),
        ])  # fmt: skip
        found = log.resending([one[1].request_id])[one[1].request_id]
        assert found == [*(each.request_id for each in one[2:]), "spaced"]
