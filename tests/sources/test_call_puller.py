"""Pulling the call logs of servers: every call once, in whatever state the servers and their files are."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from flywheel.config.file import Config, parse
from flywheel.errors import CallLogError
from flywheel.records.trace import Cursor
from flywheel.serving.calls.call_log import RecordedCall, call_log_copy_path
from flywheel.sources import call_puller
from flywheel.sources.call_puller import (
    COPY,
    OFF,
    OK,
    RECORDING_NS,
    CallLogCopy,
    CallPuller,
    PulledServer,
    pending_erasures,
    pulled_servers,
)
from flywheel.store.kernel.database import Store
from tests.factories.call_log import stored
from tests.sources.calls.log_server import LogServer
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user

KEEP_NS = 10**18


def calls(first: int, count: int) -> list[RecordedCall]:
    return [
        recorded(chat([user(f"What is {n} + 1?")]), completion(assistant(str(n + 1))), began=n)
        for n in range(first, first + count)
    ]


def config_of(folder: Path, *servers: LogServer, keep_days: float = 10_000, max_gb: float = 5) -> Config:
    serving = {"urls": [server.url for server in servers], "call_log": {"keep_days": keep_days, "max_gb": max_gb}}
    raw = {"state": {"dir": "state"}, "sources": [{"path": "a.sqlite"}], "serving": serving}
    return parse(raw, "test", folder)


@contextlib.asynccontextmanager
async def puller_of(config: Config) -> AsyncIterator[CallPuller]:
    store = await Store.open(config.state_dir)
    puller = CallPuller(store, config)
    try:
        yield puller
    finally:
        await puller.close()
        await store.close()


def server_of(puller: CallPuller, server: LogServer) -> PulledServer:
    return puller.call_log_copy.servers()[server.url]


def counts(puller: CallPuller, server: LogServer) -> tuple[int, int, int, str]:
    found = server_of(puller, server)
    return found.calls, found.missed, found.dropped, found.condition


def pulled(puller: CallPuller, wanted: Sequence[RecordedCall]) -> list[RecordedCall]:
    found = puller.call_log_copy.find([call.request_id for call in wanted])
    return [found[call.request_id] for call in wanted if call.request_id in found]


async def test_every_call_of_two_servers_is_pulled_once_byte_for_byte(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db", page_calls=7) as a, LogServer(tmp_path / "b.db") as b:
        first, second = calls(0, 20), calls(20, 5)
        a.log.append(first)
        b.log.append(second)
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            await puller.pull()
            assert pulled(puller, [*first, *second]) == [*first, *second]
            assert counts(puller, a) == (20, 0, 0, OK)
            more = calls(100, 3)
            a.log.append(more)
            asked = a.requests
            await puller.pull()
            await puller.pull()
            assert a.requests == asked + 2, "an empty page ends nothing, a full one is followed by another"
            assert (counts(puller, a)[0], counts(puller, b)[0]) == (23, 5)
            assert pulled(puller, more) == more
        # A process that was restarted goes on where the last one stopped.
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            await puller.pull()
            assert counts(puller, a) == (23, 0, 0, OK)
    assert call_log_copy_path(tmp_path / "state").stat().st_mode & 0o777 == 0o600


async def test_a_server_that_is_away_is_pulled_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LogServer(tmp_path / "a.db") as a, LogServer(tmp_path / "b.db") as b:
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            await puller.pull()
            began_ns = time.time_ns()
            assert began_ns - 10**10 < puller.read_to_ns < began_ns
            a.stop()
            wanted = calls(0, 30)
            a.log.append(wanted)
            b.log.append(calls(50, 2))
            for _ in range(3):
                await puller.pull(at_once=True)
            assert counts(puller, a) == (0, 0, 0, "unreachable")
            assert puller.read_to_ns < began_ns < time.time_ns() - 1000
            assert counts(puller, b)[0] == 2
            assert len([record for record in caplog.records if a.url in record.getMessage()]) == 1
            a.start()
            await puller.pull(at_once=True)
            assert counts(puller, a) == (30, 0, 0, OK)
            assert puller.read_to_ns > began_ns - RECORDING_NS
            assert pulled(puller, wanted) == wanted


async def test_while_all_servers_are_away_the_copy_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogServer(tmp_path / "a.db") as a:
        async with puller_of(config_of(tmp_path, a)) as puller:
            a.stop()
            assert await puller.pull()
            with monkeypatch.context() as without:
                without.setattr(CallLogCopy, "servers", None)
                assert not await puller.pull()
            a.log.append(calls(0, 3))
            a.start()
            assert await puller.pull(at_once=True)
            assert counts(puller, a) == (3, 0, 0, OK)
            assert await puller.pull()


async def test_what_was_pruned_before_it_was_pulled_is_counted(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        early = calls(0, 10)
        a.log.append(early[:4])
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull()
            a.log.append(early[4:], dropped=3)
            a.log.prune(early[8].ended_ns, KEEP_NS)
            await puller.pull()
            assert counts(puller, a) == (6, 4, 3, OK)
            a.log.prune(KEEP_NS * 9, KEEP_NS)
            await puller.pull()
            assert counts(puller, a) == (6, 4, 3, OK), "these had been pulled"
            a.log.append(calls(20, 2))
            a.log.prune(KEEP_NS * 9, KEEP_NS)
            await puller.pull()
            await puller.pull()
            assert counts(puller, a) == (6, 6, 3, OK)


async def test_a_new_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(calls(0, 10), dropped=2)
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull()
            a.log.close()
            for each in tmp_path.glob("a.db*"):
                each.unlink()
            again = calls(30, 3)
            a.log.append(again, dropped=1)
            await puller.pull()
            assert counts(puller, a) == (13, 0, 3, OK)
            assert pulled(puller, again) == again


async def test_a_copy_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        wanted = calls(0, 5)
        a.log.append(wanted)
        config = config_of(tmp_path, a)
        async with puller_of(config) as puller:
            await puller.pull()
            for each in call_log_copy_path(config.state_dir).parent.iterdir():
                each.unlink()
            await puller.pull()
            assert pulled(puller, wanted) == wanted
            assert counts(puller, a) == (5, 0, 0, OK)


async def test_an_older_copy_of_a_log_loses_nothing(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(calls(0, 3))
        a.log.close()
        copy = (tmp_path / "a.db").read_bytes()
        a.log.append(calls(3, 5))
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull()
            a.log.close()
            for each in tmp_path.glob("a.db*"):
                each.unlink()
            (tmp_path / "a.db").write_bytes(copy)
            a.log.append(again := calls(30, 1))
            await puller.pull()
            a.log.append(more := calls(40, 1))
            await puller.pull()
            assert counts(puller, a) == (10, 0, 0, OK)
            assert pulled(puller, [*again, *more]) == [*again, *more]


async def test_a_server_without_a_log_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LogServer(tmp_path / "a.db") as a:
        a.is_off = True
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull(at_once=True)
            assert counts(puller, a) == (0, 0, 0, OFF)
            assert puller.sizes(["x"]) == {"x": 0}, "nothing waits for it"
            a.is_off = False
            a.log.append(calls(0, 1))
            await puller.pull(at_once=True)
            assert counts(puller, a) == (1, 0, 0, OK)
            assert puller.sizes(["x"]) == {}
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_two_processes_that_pull_at_once_store_every_call_once(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db", page_calls=3) as a:
        a.log.append(calls(0, 10))
        config = config_of(tmp_path, a)
        async with puller_of(config) as one, puller_of(config) as other:
            await one.pull()
            await other.pull()
            a.log.append(calls(10, 5))
            await other.pull()
            await one.pull()
            assert counts(one, a) == (15, 0, 0, OK)
            assert one.call_log_copy.state().newest == 15


async def test_the_copy_keeps_its_limit_while_it_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    servers = CallLogCopy.servers

    def measured(call_log_copy: CallLogCopy) -> dict[str, PulledServer]:
        sizes.append(call_log_copy.live_bytes())
        return servers(call_log_copy)

    monkeypatch.setattr(CallLogCopy, "servers", measured)
    with LogServer(tmp_path / "a.db", page_calls=3) as a:
        told = [recorded(chat([user(os.urandom(150_000).hex())]), b"", began=n) for n in range(30)]
        a.log.append(told)
        async with puller_of(config_of(tmp_path, a, max_gb=0.001)) as puller:
            await puller.pull()
            assert counts(puller, a) == (30, 0, 0, OK)
            assert pulled(puller, told)[-1] == told[-1]
    assert len(sizes) > 10
    assert max(sizes) <= 1_000_000


async def test_old_calls_are_pruned(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(calls(0, 10))
        async with puller_of(config_of(tmp_path, a, keep_days=1)) as puller:
            await puller.pull()
            assert puller.call_log_copy.ids_after(0, 100) == []
            await puller.pull()
            assert counts(puller, a) == (10, 0, 0, OK)


async def test_erased_calls_are_erased_on_every_server_when_it_can_be_reached(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db", page_calls=7) as a, LogServer(tmp_path / "b.db") as b:
        told = calls(0, 20)
        a.log.append(told[:10])
        b.log.append(told[10:])
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            await puller.pull()
            b.stop()
            gone = [call.request_id for call in told[5:15]]
            assert await puller.erase(gone) == 10
            assert puller.pending() == {COPY: 10, a.url: 10, b.url: 10}
            await puller.pull(at_once=True)
            assert puller.pending() == {b.url: 10}
            assert stored(a.log) == told[:5]
        # A daemon that is started later goes on.
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            b.start()
            await puller.pull(at_once=True)
            assert puller.pending() == {}
            assert stored(b.log) == told[15:]
            assert pulled(puller, told) == [*told[:5], *told[15:]]
            assert counts(puller, a)[1:] == counts(puller, b)[1:] == (0, 0, OK)


async def test_a_copy_with_readers_is_purged_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_puller, "PURGE_SECONDS", 0.0)
    monkeypatch.setattr(call_puller, "PURGE_AGAIN_SECONDS", 0.0)
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(told := calls(0, 5))
        config = config_of(tmp_path, a)
        async with puller_of(config) as puller:
            await puller.pull()
            with CallLogCopy(call_log_copy_path(config.state_dir)) as reader, reader.reading():
                assert reader.state().newest == 5
                assert await puller.erase([told[0].request_id]) == 1
                await puller.pull(at_once=True)
                assert puller.pending() == {COPY: 1}
            await puller.pull(at_once=True)
            assert puller.pending() == {}


@pytest.mark.parametrize("erased", [range(3, 6), range(8, 12), range(12), [0, 1, 9, 10, 11]])
async def test_numbers_of_erased_calls_are_not_missed(tmp_path: Path, erased: Sequence[int]) -> None:
    """Those that were pulled before, and those that were not."""
    with LogServer(tmp_path / "a.db", page_calls=3) as a:
        told = calls(0, 14)
        a.log.append(told[:4])
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull()
            a.log.append(told[4:12])
            a.log.erase(told[at].request_id for at in erased)
            await puller.pull(at_once=True)
            assert counts(puller, a) == (12 - len([at for at in erased if at >= 4]), 0, 0, OK)
            a.log.append(told[12:13])
            # The oldest are pruned before they are pulled, which is not the same.
            a.log.erase([told[12].request_id])
            a.log.append([*told[13:], *calls(50, 3)])
            a.log.prune(told[13].ended_ns + 1, 10**12)
            await puller.pull(at_once=True)
            assert counts(puller, a)[1:] == (1, 0, OK)


async def test_an_erased_call_is_not_pulled_from_another_copy_of_the_log(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a, LogServer(tmp_path / "b.db") as b:
        told = calls(0, 6)
        a.log.append(told)
        async with puller_of(config_of(tmp_path, a, b)) as puller:
            await puller.pull()
            await puller.erase([told[0].request_id])
            b.log.append(told)
            await puller.pull(at_once=True)
            assert pulled(puller, told) == told[1:]
            assert stored(b.log) == told[1:]


async def test_refused_calls_are_counted(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(calls(0, 2))
        config = config_of(tmp_path, a)
        path = call_log_copy_path(config.state_dir)
        assert (pulled_servers(path), pending_erasures(path)) == ({}, {})
        async with puller_of(config) as puller:
            await puller.pull()
            assert server_of(puller, a).refused == 0
            a.log.append([], refused=3)
            await puller.pull()
            assert (server_of(puller, a).refused, counts(puller, a)) == (3, (2, 0, 0, OK))
            a.stop()
            await puller.erase(["fw-1"])
            assert pulled_servers(path)[a.url].refused == 3
            assert pending_erasures(path)[a.url] == 1


async def test_a_copy_that_cannot_be_purged_is_pulled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise CallLogError("compact the call log", "disk full", "Free some.", retryable=True)

    monkeypatch.setattr(call_puller, "PURGE_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(CallLogCopy, "purge", full)
    with LogServer(tmp_path / "a.db") as a:
        a.log.append(told := calls(0, 3))
        async with puller_of(config_of(tmp_path, a)) as puller:
            await puller.pull()
            await puller.erase([told[0].request_id])
            a.log.append(more := calls(10, 2))
            for _ in range(2):
                await puller.pull(at_once=True)
            assert pulled(puller, [*told, *more]) == [*told[1:], *more]
            assert puller.pending() == {COPY: 1}
    assert caplog.text.count("disk full") == 1


def test_a_cursor_has_the_numbers_that_still_wait_and_the_file(tmp_path: Path) -> None:
    sent = calls(0, 4)
    with CallLogCopy(tmp_path / "calls.db") as log:
        log.append(reversed(sent))
        cursor, numbers = log.unread(Cursor(), sent[2].ended_ns)
        assert list(numbers) == [4, 3], "in the order in which they began"
        assert (cursor.rowid, cursor.identity, cursor.anchor) == (4, log.state().log_id, "[1, 2]")
        log.append(late := calls(10, 1))
        assert list(log.unread(cursor, sent[3].ended_ns)[1]) == [2]
        behind, numbers = log.unread(cursor, late[0].ended_ns + 1)
        assert list(numbers) == [2, 1, 5]
        assert (behind.rowid, behind.anchor) == (5, "")
        assert log.unread(behind, 10**19 // 2) == (behind, array("q"))
        assert list(log.numbered(numbers)) == [sent[2], sent[3], late[0]]
        log.erase([sent[2].request_id])
        assert list(log.numbered(numbers)) == [sent[3], late[0]]
    for path in tmp_path.iterdir():
        path.unlink()
    with CallLogCopy(tmp_path / "calls.db") as log:
        log.append(sent)
        anew, numbers = log.unread(behind, late[0].ended_ns)
        assert list(numbers) == [1, 2, 3, 4]
        assert anew.identity != behind.identity
