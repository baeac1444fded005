"""A call log of format 1: it has the last use of each part, other part numbers, and white space in the parts.

`tests/data/calls/format-1.sql` is a dump of a daemon's copy that version 1 of the format made: three calls were
pruned, three erased, and of two conversations the last calls are not placed yet.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.call_log_page import page_json, read_page
from flywheel.sources.call_puller import COPY, CallLogCopy
from flywheel.sources.calls.conversations import extending
from tests import warm
from tests.factories.call_log import assert_gone, assert_uses_are_right, numbered, only_of, stored
from tests.sources.calls.placing import Conversations
from tests.sources.calls.recorded import BEGIN_NS, SECOND_NS, assistant, chat, completion, recorded, user

DUMP = Path(__file__).parents[2] / "data" / "calls" / "format-1.sql"
SYSTEM = {"role": "system", "content": "Be brief."}
ONE, TWO, ERASED = range(4, 7), range(7, 10), range(10, 13)
CUT, TEXT = 13, 14


def request_id(at: int) -> str:
    return f"fw-0123456789abcdef-base-{at:016x}"


def messages(of: str, turns: int) -> list[dict[str, Any]]:
    """Of a conversation: each question but the last one with its answer."""
    found = [SYSTEM]
    for at in range(turns):
        found += [user(f"{of}: question {at}"), assistant(f"{of}: answer {at} with é and “marks”")]
    return found[:-1]


def body(of: str, turn: int, at: int) -> bytes:
    tools = [{"type": "function", "function": {"name": "add"}}]
    return json.dumps(chat(messages(of, turn + 1), tools=tools, seed=at)).encode()


def later(of: str, at: int, **more: Any) -> RecordedCall:
    """What a client of that conversation sends now."""
    made = recorded(body(of, 3, at), completion(assistant("now")), began=30, request_id=request_id(at))
    return replace(made, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "calls.db"
    with closing(sqlite3.connect(made)) as connection:
        connection.executescript(DUMP.read_text())
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    return made


def test_its_calls_are_read_and_others_added(path: Path) -> None:
    with CallLogCopy(path) as log:
        assert log.state() == ("983f300c3c8f001b", 4, 14, 2, 1)
        calls = {call.request_id: call for call in stored(log)}
        for of, numbers in (("one", ONE), ("two", TWO)):
            assert [calls[request_id(at)].request for at in numbers] == [
                body(of, turn, at) for turn, at in enumerate(numbers)
            ]
        assert calls[request_id(CUT)].request == b'{"model": "agent", "messages": [{"role": "us'
        assert calls[request_id(CUT)].response == b"\xff\xfe"
        assert calls[request_id(TEXT)].request == b'{"model": "agent", "input": "hi", "n": 1.0}'
        assert (calls[request_id(TEXT)].unit, calls[request_id(TEXT)].arm) == ("0123456789abcdef", "new")
        assert log.append([later("one", 20)]) == 1
        assert [each for _, each in read_page(page_json(log, 0, 99, 10**9), 0).calls] == stored(log)
        assert [number for number, _ in numbered(log)] == [4, 5, 7, 8, 10, 11, 13, 14, 15]
        assert_uses_are_right(log)


def test_a_process_of_the_earlier_version_that_goes_on_changes_nothing(path: Path) -> None:
    """A server that was not restarted yet, while another process opens its file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as older, CallLog(path) as log:
        assert older.execute("SELECT count(*) FROM calls").fetchone() == (8,)
        before = stored(log)
        with pytest.raises(sqlite3.OperationalError, match="no such column: last_call"), older:
            older.execute("BEGIN")
            older.execute("DELETE FROM calls WHERE number = 4")
            older.execute("UPDATE part_uses SET last_call = 15 WHERE part BETWEEN 1 AND 9")
        assert stored(log) == before
        assert older.execute("PRAGMA user_version").fetchone() == (2,), "it is refused when it is opened again"


OPENER = """
import sys, threading
from pathlib import Path
from flywheel.serving.calls import stored_parts
from flywheel.serving.calls.call_log import CallLog
runs, left = stored_parts.runs, [5]
def stopping(request):
    left[0] -= 1
    if not left[0]:
        print("converting", flush=True)
        threading.Event().wait()
    return runs(request)
convert = stored_parts.convert
if sys.argv[2] == "read":
    stored_parts.runs = stopping
else:
    def converted(connection):
        convert(connection)
        print("converting", flush=True)
        threading.Event().wait()
    stored_parts.convert = converted
CallLog(Path(sys.argv[1])).state()
"""


@pytest.mark.parametrize("moment", ["read", "written"])
def test_kill_9_while_it_is_converted_leaves_the_old_file(path: Path, moment: str) -> None:
    opener = warm.Popen([sys.executable, "-c", OPENER, str(path), moment], stdout=subprocess.PIPE)
    try:
        assert opener.stdout is not None
        assert opener.stdout.readline() == b"converting\n"
    finally:
        os.kill(opener.pid, signal.SIGKILL)
        opener.wait()
        if opener.stdout is not None:
            opener.stdout.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT last_call FROM part_uses WHERE part = 1").fetchone() == (14,)
    with CallLog(path) as log:
        assert len(stored(log)) == 8
        assert_uses_are_right(log)


def test_several_may_open_it_at_once(path: Path) -> None:
    barrier = threading.Barrier(4)

    def opened() -> int:
        with CallLog(path) as log:
            barrier.wait(60)
            return len(stored(log))

    with ThreadPoolExecutor(4) as threads:
        assert [each.result() for each in [threads.submit(opened) for _ in range(4)]] == [8] * 4
    with CallLog(path) as log:
        assert_uses_are_right(log)


def test_its_calls_are_placed(path: Path) -> None:
    with CallLogCopy(path) as log:
        log.append([later("one", 20)])
        conversations = Conversations(log, idle_ns=3600 * SECOND_NS)
        while conversations.place(BEGIN_NS + 10**6 * SECOND_NS):
            pass
        replies = conversations.due(BEGIN_NS + 10**6 * SECOND_NS)
    by_call = {call.request_id: reply.conversation for reply in replies for call in reply.calls}
    for numbers in (ONE, TWO):
        assert len({by_call[request_id(at)] for at in numbers}) == 1
    assert by_call[request_id(20)] == by_call[request_id(ONE[0])]


def test_later_calls_that_resend_its_calls_are_found(path: Path) -> None:
    with CallLogCopy(path) as log:
        log.append([later("one", 20), later("two", 21, conversation="c-2", user="")])
        # Half a surrogate pair, which msgspec refuses: the request is kept as it was sent.
        odd = later("one", 22, request=body("one", 3, 22).replace(b"question 3", rb"question \ud800"))
        log.append([odd, later("one", 23)])
        told = [request_id(at) for at in (ONE[1], ONE[2], 20, 22, 23)]
        assert sorted(extending(log, [request_id(ONE[0])])) == told
        assert extending(log, [request_id(ONE[2])]) == told[2:]
        assert extending(log, [request_id(TEXT), request_id(CUT)]) == []


def test_its_calls_are_pruned(path: Path) -> None:
    with CallLogCopy(path) as log:
        log.append([later("one", 20)])
        before_ns = BEGIN_NS + 12 * SECOND_NS
        assert log.older(before_ns) == 3
        assert log.prune(before_ns, 10**9) == 3
        assert [number for number, _ in numbered(log)] == [8, 10, 11, 13, 14, 15]
        assert_uses_are_right(log)
        assert log.prune(BEGIN_NS + 99 * SECOND_NS, 10**9) == 6
        with log.reading() as connection:
            assert connection.execute("SELECT count(*) FROM parts").fetchone() == (0,)


def test_its_erasures_hold_and_its_calls_are_erased(path: Path) -> None:
    with CallLogCopy(path) as log:
        gone = [request_id(at) for at in ERASED]
        assert log.append(later("erased", at) for at in ERASED) == 0
        assert log.erased([*gone, request_id(ONE[0])]) == set(gone)
        assert log.erased_between(0, 99) == 3
        assert log.pending() == {COPY: 3, "http://127.0.0.1:8000": 3}
        assert log.ids_of(["c-2"], []) == log.ids_of([], ["ana"]) == [request_id(at) for at in TWO]
        calls = stored(log)
        some = [each for each in calls if each.request_id in {request_id(at) for at in TWO}]
        left = [each for each in calls if each not in some]
        assert log.erase(each.request_id for each in some) == 3
        assert log.purge()
        assert stored(log) == left
        assert_uses_are_right(log)
    assert_gone(path, only_of(some, left), left)
    assert b"two: question" not in path.read_bytes()
