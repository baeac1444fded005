"""The call log: values, linear growth, private files, pages, pruning, and what kill -9 and a full disk leave."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flywheel.errors import CallLogError
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.call_log_page import page_json, read_page
from flywheel.serving.calls.stored_parts import MAX_PARTS, packed, runs, split
from tests import warm
from tests.factories.call_log import call, compact, conversation, numbered, stored
from tests.waiting import wait_for

HOUR_NS = 3600 * 10**9


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
bodies = st.builds(
    lambda value, indent, ascii_, cut: json.dumps(value, indent=indent, ensure_ascii=ascii_).encode()[: cut or None],
    st.dictionaries(st.sampled_from(["model", "messages", "input", "tools"]), st.lists(json_values, max_size=4)),
    st.none() | st.integers(0, 2),
    st.booleans(),
    st.just(0) | st.integers(-3, -1),
)


def same(one: bytes, two: bytes) -> bool:
    """Whether two bodies have the same keys and values; of one that is no JSON, the same bytes."""
    try:
        return bool(json.loads(one, parse_constant=str) == json.loads(two, parse_constant=str))
    except ValueError:
        return one == two


@pytest.mark.slow
@given(st.lists(st.binary(max_size=60) | bodies | st.text(max_size=60).map(str.encode), max_size=6))
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_body_comes_back_value_for_value(tmp_path: Path, requests: list[bytes]) -> None:
    path = tmp_path / f"{time.monotonic_ns()}.db"
    told = [call(f"fw-{at}", body, response=body[::-1]) for at, body in enumerate(requests)]
    with CallLog(path) as log:
        assert log.append(told) == len(told)
        kept = stored(log)
        assert all(same(one.request, two.request) for one, two in zip(kept, told, strict=True))
        assert [replace(each, request=b"") for each in kept] == [replace(each, request=b"") for each in told]
        page = read_page(page_json(log, 0, 100, 10**9), 0)
        assert [each for _, each in page.calls] == kept
        assert page.state == log.state()
        # What a log gives is stored by another one as it is.
        with CallLog(path.with_suffix(".copy")) as copy:
            copy.append(kept)
            assert stored(copy) == kept


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"agent","messages":[]}',
        b'{"messages":[{"role":"user","content":"\xc3\xa9\\u00e9","n":1.0}],"a":1e2,"b":123456789012345678901234567890}',
        b'{"input":[1],"messages":[{},[]],"messages2":[1,2]}',
        b'{"model": "agent", "messages": [{"content": "\\ud800"}]}',
        b'{"model": "agent", "x": NaN}',
        b'\xef\xbb\xbf{"model": "agent"}',
        '{"model": "agent"}'.encode("utf-16"),
        b'{"a": "\xff"',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bodies_without_white_space_and_those_that_msgspec_refuses_come_back_byte_for_byte(
    tmp_path: Path, body: bytes
) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([call(request=body)])
        assert stored(log)[0].request == body


def test_the_values_of_a_body_are_the_bytes_that_were_sent(tmp_path: Path) -> None:
    body = b' {"messages" : [ {"role" : "user"} ,\n2.50],"a": 1,"t": {"x" :  1} , "a":\t0.10 }\n'
    with CallLog(tmp_path / "calls.db") as log:
        log.append([call(request=body)])
        assert stored(log)[0].request == b'{"messages":[{"role" : "user"},2.50],"a":0.10,"t":{"x" :  1}}'


UNIT = {"unit": "0123456789abcdef", "arm": "new", "unit_kind": "conversation"}


def test_a_page_of_an_older_server_has_no_units_and_a_wrong_one_is_no_page(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([call(**UNIT)])
        page = json.loads(page_json(log, 0, 9, 10**9))
    assert {name: page["calls"][0][name] for name in UNIT} == UNIT
    for name, value in (("unit", "0123"), ("unit", "x" * 16), ("arm", "newer"), ("unit_kind", "guess"), ("arm", 1)):
        with pytest.raises(ValueError, match=name):
            read_page(json.dumps({**page, "calls": [{**page["calls"][0], name: value}]}), 0)
    older = {name: value for name, value in page["calls"][0].items() if name not in UNIT}
    ((_, read),) = read_page(json.dumps({**page, "calls": [older]}), 0).calls
    assert read == call()


@given(st.lists(st.integers(1, 2000)))
def test_part_numbers_are_packed_without_loss(numbers: list[int]) -> None:
    assert [part for first, last in runs(packed(numbers)) for part in range(first, last + 1)] == numbers


def test_numbers_of_a_conversation_whose_other_parameters_change_are_packed_well() -> None:
    """Each request adds two messages, and a part that no other one has."""
    assert len(packed([number for at in range(800) for number in (3 * at, 3 * at + 1)])) < 60


def test_a_message_is_the_same_part_at_the_end_and_in_the_middle() -> None:
    one = json.dumps({"messages": [{"a": 1}, {"b": ["]", {}]}], "stream": True}).encode()
    two = json.dumps({"messages": [{"a": 1}, {"b": ["]", {}]}, {"c": 3}], "stream": True}).encode()
    assert split(one).parts == [b'{"messages":[{"a": 1}', b',{"b": ["]", {}]}', b'],"stream":true', b"}"]
    assert set(split(one).parts) < set(split(two).parts)


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"a"', b'{"messages":[{}', b"\xff", "{}".encode("utf-16"), b'{"a":' + b"9" * 5000]
)
def test_a_body_that_is_no_object_is_one_part(body: bytes) -> None:
    assert split(body).parts == ([body] if body else [])


def test_the_number_of_parts_is_limited() -> None:
    for body in (compact({"input": [1] * 100_000}), compact(dict.fromkeys(map(str, range(100_000)))), b"[" * 100_000):
        assert split(body).parts == [body]
    assert len(split(compact({"input": [1] * (MAX_PARTS - 1)})).parts) == MAX_PARTS


@pytest.mark.slow
def test_a_growing_conversation_grows_the_file_linearly(tmp_path: Path) -> None:
    sizes = []
    for calls in (30, 60, 120):
        with CallLog(tmp_path / f"{calls}.db") as log:
            # Beside others, so that the parts of one conversation are not neighbours.
            for each in zip(*(conversation(calls, seed) for seed in range(3)), strict=True):
                log.append(each)
            sizes.append(log.live_bytes())
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[2] < 2.2 * sizes[1]
    assert sizes[2] < 3 * sum(len(body) for body in split(conversation(120)[-1].request).parts)


def test_the_files_are_private(tmp_path: Path) -> None:
    os.umask(os.umask(0))  # read it
    with CallLog(tmp_path / "serving" / "calls.db") as log:
        log.append([call()])
        files = sorted(tmp_path.glob("serving/*"))
        assert [each.name for each in files] == ["calls.db", "calls.db-shm", "calls.db-wal"]
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        assert stat.S_IMODE((tmp_path / "serving").stat().st_mode) == 0o700


def test_numbers_are_contiguous_and_repetitions_ignored(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        empty = log.state()
        assert (empty.oldest, empty.newest, empty.dropped) == (1, 0, 0)
        assert log.append([call("a"), call("a"), call("b")], dropped=3) == 2
        assert log.append([call("b", b"other"), call("c")]) == 1
        assert [number for number, _ in numbered(log)] == [1, 2, 3]
        assert log.state()[:4] == (empty.log_id, 1, 3, 3)
        assert log.find(["b", "nobody"])["b"].request == call().request
        assert log.sizes(["b", "nobody"]) == {"b": len(call().request) + len(call().response)}
    with CallLog(tmp_path / "calls.db") as log:
        assert log.state()[:4] == (empty.log_id, 1, 3, 3)


def test_pages_are_limited_and_tell_each_part_once(tmp_path: Path) -> None:
    told = conversation(40)
    with CallLog(tmp_path / "calls.db") as log:
        log.append(told)
        assert [each.number for each in log.after(38, 10, 10**9)[0]] == [39, 40]
        assert len(log.after(0, 7, 10**9)[0]) == 7
        assert len(log.after(0, 100, 1)[0]) == 1
        pulled: list[RecordedCall] = []
        pages = 0
        while page := read_page(page_json(log, len(pulled), 100, 30_000), len(pulled)).calls:
            assert [number for number, _ in page] == list(range(len(pulled) + 1, len(pulled) + len(page) + 1))
            pulled += [each for _, each in page]
            pages += 1
        assert pulled == told
        assert 2 < pages < 40
        whole = page_json(log, 0, 100, 10**9)
        assert len(whole) < 3 * len(told[-1].request)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"log": 1, "texts": [], "calls": [{}]}', '{"calls": 1}'])
def test_what_is_no_page_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_page(text, 0)


def test_calls_are_pruned_by_age(tmp_path: Path) -> None:
    old, new = conversation(20, 1, ended_ns=HOUR_NS), conversation(20, 2, ended_ns=3 * HOUR_NS)
    with CallLog(tmp_path / "calls.db") as log:
        log.append([*old, *new])
        assert log.older(2 * HOUR_NS) == 20
        assert log.prune(HOUR_NS, 10**9) == 0
        assert log.prune(2 * HOUR_NS, 10**9) == 20
        assert stored(log) == new
        assert log.state()[1:4] == (21, 40, 0)
        with log.reading() as connection:
            used = {part for (part,) in connection.execute("SELECT part FROM parts")}
            counted = {part for (part,) in connection.execute("SELECT part FROM part_uses")}
        # What both conversations have is there, and nothing that only the old one had.
        assert used == counted
        assert len(used) == len({part for each in new for part in split(each.request).parts})
        assert log.prune(4 * HOUR_NS, 10**9) == 20
        assert log.state()[1:4] == (41, 40, 0)
        assert log.older(4 * HOUR_NS) == 0
        log.append([call("next")])
        assert log.state()[1:4] == (41, 41, 0)


def test_calls_are_pruned_by_size(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        for seed in range(10):
            log.append(conversation(20, seed))
        whole = log.live_bytes()
        assert log.prune(0, whole) == 0
        removed = log.prune(0, whole // 2)
        assert 80 <= removed <= 130
        assert log.live_bytes() <= whole // 2
        told = [each for seed in range(10) for each in conversation(20, seed)]
        assert stored(log) == told[removed:]
        size = (tmp_path / "calls.db").stat().st_size
        for seed in range(10, 14):
            log.append(conversation(20, seed))
        assert (tmp_path / "calls.db").stat().st_size <= size  # freed pages are used again
        assert log.prune(0, 0) == 280 - removed


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=25), st.integers(0, 25))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pruning_never_takes_what_a_later_call_has(tmp_path: Path, shape: list[tuple[int, int]], keep: int) -> None:
    """Any order of conversations that share messages."""
    told = []
    for at, (seed, messages) in enumerate(shape):
        body = {"model": "agent", "messages": [f"{seed % 2}-{place}" for place in range(messages)], "seed": seed}
        told.append(call(f"fw-{at}", compact(body), ended_ns=at + 1))
    with CallLog(tmp_path / f"{time.monotonic_ns()}.db") as log:
        log.append(told)
        log.prune(keep + 1, 10**9)
        assert stored(log) == told[keep:]
        with log.reading() as connection:
            (parts,) = connection.execute("SELECT count(*) FROM parts").fetchone()
        assert parts == len({part for each in told[keep:] for part in split(each.request).parts})


def test_a_transaction_is_shared_and_rolled_back_as_one(tmp_path: Path) -> None:
    class CallLogCopy(CallLog):
        extra_tables = ("CREATE TABLE IF NOT EXISTS servers (url TEXT PRIMARY KEY, after INTEGER)",)

    def pull(request_id: str, after: int, *, fail: bool = False) -> None:
        with log.transaction() as connection:
            log.append([call(request_id)])
            connection.execute("INSERT OR REPLACE INTO servers VALUES ('here', ?)", (after,))
            assert log.state().newest == after
            if fail:
                raise ZeroDivisionError

    with CallLogCopy(tmp_path / "calls.db") as log:
        pull("a", 1)
        with pytest.raises(ZeroDivisionError):
            pull("b", 2, fail=True)
        pull("c", 2)
        assert [each.request_id for each in stored(log)] == ["a", "c"]
        with log.reading() as connection:
            assert connection.execute("SELECT after FROM servers").fetchall() == [(2,)]


def test_threads_may_share_a_log(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        for each in conversation(10, seed):
            log.append([each])
            numbered(log)

    with CallLog(tmp_path / "calls.db") as log:
        threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [number for number, _ in numbered(log)] == list(range(1, 41))


def test_a_second_connection_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Else a process that ends would take itself for the last one, and remove the write-ahead log of the others."""
    path = tmp_path / "calls.db"
    with CallLog(path) as first, CallLog(path) as second:
        first.append([call("a")])
        second.state()
        reader = (
            "from tests.serving.calls.test_call_log import *\n"
            f"log = CallLog(Path({str(path)!r})); log.state(); log.close()"
        )
        warm.run([sys.executable, "-c", reader], check=True, timeout=60)
        assert (tmp_path / "calls.db-wal").exists()
        first.append([call("b")])
        assert len(stored(second)) == 2


def test_a_removed_file_is_made_again(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([call("a")])
        before = log.state().log_id
        for file in tmp_path.iterdir():
            file.unlink()
        log.append([call("b")])
        assert log.state().log_id != before
        assert [each.request_id for each in stored(log)] == ["b"]


def test_a_file_that_is_no_log_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    path.write_bytes(b"something else" * 1000)
    with CallLog(path) as log, pytest.raises(CallLogError, match=r"calls\.db.*not a database.*Move the file away"):
        log.state()
    path.unlink()
    with CallLog(path) as log:
        log.append([call()])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    with CallLog(path) as log, pytest.raises(CallLogError, match="newer version of Flywheel"):
        log.append([call()])


WRITER = """
import sys
from pathlib import Path
from flywheel.serving.calls.call_log import CallLog
from tests.factories.call_log import conversation
log = CallLog(Path(sys.argv[1]))
print("ready", flush=True)
seed = 0
while True:
    seed += 1
    for each in conversation(30, seed):
        log.append([each])
"""


@pytest.mark.slow
def test_what_kill_9_leaves_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    told = {each.request_id: each for seed in range(1, 100) for each in conversation(30, seed)}
    before = 0
    for _ in range(3):
        writer = warm.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            with CallLog(path) as log:
                wait_for(lambda: log.state().newest > before + 20, "calls", seconds=60)  # noqa: B023
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
        with CallLog(path) as log:
            before = log.state().newest
            found = numbered(log)
            assert [number for number, _ in found] == list(range(1, before + 1))
            assert all(each == told[each.request_id] for _, each in found)


FULL = """
import resource, signal, sys
from pathlib import Path
from flywheel.serving.calls.call_log import CallLog, CallLogError
from tests.factories.call_log import conversation, numbered, stored
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = CallLog(Path(sys.argv[1]))
log.append(conversation(5, 1))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, most))
failed = 0
for seed in range(2, 8):
    try:
        log.append(conversation(50, seed))
    except CallLogError as error:
        failed += 1
        print(error)
assert failed, "the disk never filled"
assert [each.request_id for each in stored(log)][:5] == [each.request_id for each in conversation(5, 1)]
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.append(conversation(5, 9), dropped=failed)
state = log.state()
assert state.dropped == failed, state
assert [number for number, _ in numbered(log)] == list(range(1, state.newest + 1))
assert [each.request for each in stored(log)][-5:] == [each.request for each in conversation(5, 9)]
"""


@pytest.mark.slow
def test_a_full_disk_loses_what_is_not_there_and_no_more(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "calls.db")],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot write to the call log" in done.stdout
    assert "free space" in done.stdout


def test_a_new_file_may_be_opened_by_several_at_once(tmp_path: Path) -> None:
    for attempt in range(30):
        path = tmp_path / f"calls-{attempt}.db"
        barrier = threading.Barrier(4)

        def opened(path: Path = path, barrier: threading.Barrier = barrier) -> str:
            with CallLog(path) as log:
                barrier.wait(60)
                return log.state().log_id

        with ThreadPoolExecutor(4) as threads:
            assert len({each.result() for each in [threads.submit(opened) for _ in range(4)]}) == 1
