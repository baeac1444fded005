"""Pulls the call logs of all servers into one copy, and gives their calls to the readers of traces."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from flywheel.config.file import Config
from flywheel.conversations import forms_of
from flywheel.errors import CallLogError, ServeError
from flywheel.records.trace import Cursor, ModelCall
from flywheel.serving.calls.call_log import PURGE_SECONDS, CallLog, RecordedCall, call_log_copy_path
from flywheel.serving.calls.call_log_page import CallPage
from flywheel.serving.replica_addresses import is_name, replica_urls
from flywheel.serving.server_keys import admin_key
from flywheel.sources.calls.parsing import parse
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.watches import UnitCall
from flywheel.system.files import looked_up

if TYPE_CHECKING:
    from flywheel.serving.client.replica_client import Replica

log = logging.getLogger(__name__)

PAGE_CALLS: Final = 1_000
IDS_AT_ONCE: Final = 5_000
PAUSE_SECONDS: Final = 0.5
"""The least time between two pulls that wait for a call."""
RECORDING_NS: Final = 1_000_000_000
"""A call is in a server's log so long after its end at the latest, usually at once. Clocks may differ as much."""
PULL_SECONDS: Final = 60.0
"""One pull of a server takes so long at most, unless it is awaited to its end: others wait for it."""
LONGEST_BACKOFF_SECONDS: Final = 15.0
"""A server that is away is asked again after this time at most."""
PURGE_AGAIN_SECONDS: Final = 60.0
"""A log in which traces of erased calls may be left is asked to remove them after this time."""
COPY: Final = "the copy"
"""In place of a server's URL, in `pending`: the file of this class."""
OK: Final = "ok"
OFF: Final = "off"
"""Conditions of servers: calls are pulled, or the server records none. Others are those of errors."""


@dataclass(frozen=True, slots=True)
class PulledServer:
    """How far the log of one server was read, and what of it is missing.

    `after` is the number of the last call that was read of the log `log_id`. `calls` counts those that were stored,
    `missed` those that the server had pruned before, and `dropped` those that it could not record.
    `refused` counts those that were not to be recorded. `condition` is empty before the first answer.
    """

    url: str
    log_id: str = ""
    after: int = 0
    calls: int = 0
    missed: int = 0
    dropped: int = 0
    log_dropped: int = 0
    condition: str = ""
    error: str = ""
    refused: int = 0


_SERVERS: Final = f"SELECT {', '.join(PulledServer.__slots__)} FROM servers"  # noqa: S608 - constants

_PENDING: Final = "SELECT url, count(*) FROM pending_erasures GROUP BY url"


def pulled_servers(path: Path) -> dict[str, PulledServer]:
    """Every server that was ever asked, by URL, for a look at the file beside the process that writes it. Nothing, if
    there is no such file or it cannot be read."""
    return {row[0]: PulledServer(*row) for row in looked_up(path, _SERVERS)}


def pending_erasures(path: Path) -> dict[str, int]:
    """How many calls are to be erased still, as `CallLogCopy.pending` says, for a look at the file beside the process
    that writes it. Nothing, if there is no such file or it cannot be read."""
    return dict(looked_up(path, _PENDING))


class CallLogCopy(CallLog):
    """The calls of all servers in one file; a call that is pulled twice is stored once."""

    extra_tables: ClassVar = (
        "CREATE TABLE IF NOT EXISTS servers (url TEXT PRIMARY KEY, log_id TEXT NOT NULL, after INTEGER NOT NULL, "
        "calls INTEGER NOT NULL, missed INTEGER NOT NULL, dropped INTEGER NOT NULL, log_dropped INTEGER NOT NULL, "
        "condition TEXT NOT NULL, error TEXT NOT NULL, refused INTEGER NOT NULL)",
        "CREATE TABLE IF NOT EXISTS pending_erasures (url TEXT NOT NULL, request_id TEXT NOT NULL, "
        "PRIMARY KEY (url, request_id)) WITHOUT ROWID",
    )

    def servers(self) -> dict[str, PulledServer]:
        """Every server that was ever asked, by URL."""
        with self.reading() as connection:
            rows = connection.execute(_SERVERS).fetchall()
        return {row[0]: PulledServer(*row) for row in rows}

    def store_page(self, url: str, page: CallPage) -> bool:
        """Store a page of a server's log, and how far it was read; whether more may follow."""
        log = page.state
        with self.transaction() as connection:
            # Another process may have stored the same page meanwhile.
            server = _server(connection, url)
            first, last = (page.calls[0][0], page.calls[-1][0]) if page.calls else (log.newest + 1, log.newest)
            is_same = server.log_id == log.log_id
            after = server.after if is_same else 0
            if is_same and after > log.newest:
                after = first - 1  # An older copy of the file: its calls are known.
            stored = self.append(call for _, call in page.calls)
            _store(
                connection,
                PulledServer(
                    url,
                    log.log_id,
                    max(after, last),
                    server.calls + stored,
                    server.missed + max(0, first - after - 1 - page.erased),
                    server.dropped + max(0, log.dropped - (server.log_dropped if is_same else 0)),
                    log.dropped,
                    OK,
                    refused=log.refused,
                ),
            )
        return last < log.newest

    def named(self) -> tuple[set[str], set[str]]:
        """The conversations and the users that calls name. Only indexes are read."""
        with self.reading() as connection:
            conversations, users = (
                {str(name) for (name,) in connection.execute(f"SELECT DISTINCT {what} FROM calls WHERE {what} <> ''")}  # noqa: S608
                for what in ("conversation", "user")
            )
        return conversations, users

    def erase_everywhere(self, request_ids: Collection[str], urls: Iterable[str] = ()) -> int:
        """Erase calls here, and note them for every server that was ever asked and for `urls`: the daemon has them
        erased there when it pulls. Returns how many were here. After a crash, the next pull finishes it."""
        with self.transaction() as connection:
            for url in {COPY, *urls, *self.servers()}:
                rows = [(url, request_id) for request_id in request_ids]
                connection.executemany("INSERT OR IGNORE INTO pending_erasures VALUES (?, ?)", rows)
        return self.erase(request_ids)

    def pending(self) -> dict[str, int]:
        """How many calls are to be erased still, by the URL of the server, or `COPY` for this file itself."""
        with self.reading() as connection:
            return dict(connection.execute(_PENDING).fetchall())

    def pending_of(self, url: str, limit: int) -> list[str]:
        """Request ids of some of the calls that are to be erased there."""
        query = "SELECT request_id FROM pending_erasures WHERE url = ? ORDER BY request_id LIMIT ?"
        with self.reading() as connection:
            return [request_id for (request_id,) in connection.execute(query, (url, limit))]

    def have_erased(self, url: str, request_ids: Iterable[str]) -> None:
        """Note that no trace of these calls is left there."""
        with self.transaction() as connection:
            rows = [(url, request_id) for request_id in request_ids]
            connection.executemany("DELETE FROM pending_erasures WHERE url = ? AND request_id = ?", rows)

    def finish_erasing(self, seconds: float) -> bool:
        """Erase and purge what is pending for this file; whether nothing is left."""
        while ids := self.pending_of(COPY, IDS_AT_ONCE):
            self.erase(ids)
            if not self.purge(seconds):
                return False
            self.have_erased(COPY, ids)
        return True

    def note(self, url: str, condition: str, error: str = "") -> None:
        """Note the condition of a server that gave no page."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO servers VALUES (?, '', 0, 0, 0, 0, 0, ?, ?, 0) "
                "ON CONFLICT (url) DO UPDATE SET condition = excluded.condition, error = excluded.error",
                (url, condition, error),
            )

    def calls_of(self, request_ids: Collection[str]) -> dict[str, ModelCall]:
        """Those of these calls that are there, parsed, by request id."""
        return {request_id: parse(call) for request_id, call in self.find(request_ids).items()}

    def ids_after(self, number: int, limit: int) -> list[tuple[int, str]]:
        """Numbers and request ids of the calls that were stored after that one, in their order."""
        query = "SELECT number, request_id FROM calls WHERE number > ? ORDER BY number LIMIT ?"
        with self.reading() as connection:
            return [
                (int(call_number), str(request_id))
                for call_number, request_id in connection.execute(query, (number, limit))
            ]

    def unread(self, cursor: Cursor, before_ns: int) -> tuple[Cursor, array[int]]:
        """The numbers of the calls that were stored since a cursor, or that waited then, and ended before
        `before_ns`, in the order in which they began; and the cursor behind them.

        A cursor is the number of the last call (`rowid`) in the file with this id (`identity`), and the numbers of
        those that still wait (`anchor`).
        """
        ready, waiting = array("q"), []
        query = (
            "SELECT number, ended_ns < ? FROM calls WHERE number > ? OR number IN (SELECT value FROM json_each(?)) "
            "ORDER BY started_ns, number"
        )
        with self.reading() as connection:
            state = self.state()
            # The file was removed, or an older one was put in its place: its calls are read from the first.
            is_same = cursor.identity == state.log_id and cursor.rowid <= state.newest
            after, waited = (cursor.rowid, cursor.anchor) if is_same else (0, "")
            for number, is_ready in connection.execute(query, (before_ns, after, waited or "[]")):
                if is_ready:
                    ready.append(number)
                else:
                    waiting.append(number)
        anchor = json.dumps(sorted(waiting)) if waiting else ""
        return Cursor(state.newest, state.log_id, anchor=anchor), ready

    def numbered(self, numbers: Iterable[int]) -> Iterator[RecordedCall]:
        """Those of the calls with these numbers that are still there, in this order, one at a time."""
        for number in numbers:
            with self.reading() as connection:
                row = connection.execute("SELECT request_id FROM calls WHERE number = ?", (number,)).fetchone()
                found = self.find(row or ())
            yield from found.values()

    def units_after(self, number: int, limit: int) -> list[UnitCall]:
        """The calls that belong to a unit, of those that were stored after that one, in their order."""
        query = (
            "SELECT number, request_id, unit, arm, unit_kind, version, started_ns, ended_ns FROM calls "
            "WHERE number > ? AND unit <> '' ORDER BY number LIMIT ?"
        )
        with self.reading() as connection:
            return [UnitCall(*row) for row in connection.execute(query, (number, limit))]


def _server(connection: sqlite3.Connection, url: str) -> PulledServer:
    row = connection.execute(f"{_SERVERS} WHERE url = ?", (url,)).fetchone()
    return PulledServer(*row) if row else PulledServer(url)


def _store(connection: sqlite3.Connection, server: PulledServer) -> None:
    values = [getattr(server, name) for name in PulledServer.__slots__]
    connection.execute(f"INSERT OR REPLACE INTO servers VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608


class CallPuller:
    """The copy of all call logs. `sizes` may be called from any thread but the event loop's."""

    def __init__(self, store: Store, config: Config) -> None:
        assert config.serving.call_log is not None
        self.call_log_copy = CallLogCopy(call_log_copy_path(config.state_dir))
        self._store = store
        self._config = config
        self._settings = config.serving.call_log
        private = config.privacy.exclude
        self._private_users, self._private_conversations = frozenset(private.users), forms_of(private.conversations)
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pulled_at = 0.0
        self._failures: dict[str, tuple[int, float]] = {}
        self._entries: dict[str, str] = {}
        self._replicas: dict[str, tuple[str | None, Replica]] = {}
        self._warned: set[str | tuple[str, str]] = set()
        self._servers: dict[str, PulledServer] | None = None
        self._stopped = False
        self._erase_at: dict[str, float] = {}
        self._late_to: int | None = None
        self._complete_ns = 0
        self._wait_ns = int(config.ingest.calls_wait_seconds * 1e9)
        self.reopened: set[int] = set()
        """Numbers of sources with traces that are to be read again for calls that another reply has released."""

    @property
    def read_to_ns(self) -> int:
        """Every call that ended before this time, in nanoseconds since 1970, has been pulled. Of a server that is
        away, calls may be missing that ended more than `ingest.calls_wait_seconds` ago."""
        return max(self._complete_ns, time.time_ns() - self._wait_ns) if self.has_pulled else 0

    @property
    def has_pulled(self) -> bool:
        """Whether this process has asked all servers."""
        return self._pulled_at > 0

    def begin(self) -> None:
        """Note the event loop, for the readers' threads."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """End a pull at its next page."""
        self._stopped = True

    def sizes(self, request_ids: Collection[str]) -> Mapping[str, int]:
        """How many bytes these calls have, as far as they are there. The first question pulls all servers. If none of
        them records calls, none is waited for: each has no bytes.
        """
        if not self._pulled_at and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._pull_first(), self._loop).result()
        sizes = self.call_log_copy.sizes(request_ids)
        if self._servers and all(server.condition == OFF for server in self._servers.values()):
            return {**dict.fromkeys(request_ids, 0), **sizes}
        return sizes

    async def _pull_first(self) -> None:
        if not self._pulled_at:
            await self.pull()

    async def pull(self, *, at_once: bool = False, seconds: float = PULL_SECONDS) -> bool:
        """Pull all servers to the ends of their logs, or for so many seconds, `at_once` also those that have just
        failed. An error of one server is noted in the copy, and it is asked again later. False, without a look at
        the copy, if all have just failed. Raises CallLogError.
        """
        async with self._lock:
            began_ns = time.time_ns()
            if not at_once and self._have_all_failed:
                return False
            self._entries = await replica_urls(self._config.serving)
            for url in self._replicas.keys() - self._entries.keys():
                await self._replicas.pop(url)[1].close()
            # Each time, as the file may have been removed meanwhile.
            self._servers = await asyncio.to_thread(self.call_log_copy.servers)
            are_complete = await asyncio.gather(
                *(self._pull(url, at_once, time.monotonic() + seconds) for url in self._entries)
            )
            if all(are_complete):
                self._complete_ns = began_ns - RECORDING_NS
            self._pulled_at = time.monotonic()
            await asyncio.to_thread(self.prune)
            await self._finish_erasing()
        return True

    @property
    def _have_all_failed(self) -> bool:
        """Whether there is no server but those that failed and are asked again later. A name may have others now."""
        now = time.monotonic()
        rests = {url for url, (failures, at) in self._failures.items() if failures and now < at}
        is_fixed = not any(map(is_name, self._entries.values()))
        return is_fixed and bool(self._entries) and self._entries.keys() <= rests

    async def erase(self, request_ids: Collection[str]) -> int:
        """Erase calls from the copy, and from every server at the next pull that reaches it. Returns how many were in
        the copy. Raises CallLogError."""
        # A name that has no address now is none of a server's.
        urls = [url for url in await replica_urls(self._config.serving) if not is_name(url)]
        erased = await asyncio.to_thread(self.call_log_copy.erase_everywhere, request_ids, urls)
        self._erase_at.clear()
        return erased

    async def erase_new(self, request_ids: Collection[str]) -> None:
        """Erase those of the calls that were not erased before. Raises CallLogError."""
        erased = await asyncio.to_thread(self.call_log_copy.erased, request_ids)
        if new := [each for each in request_ids if each not in erased]:
            await self.erase(new)

    def pending(self) -> dict[str, int]:
        """How many calls are to be erased still, by the URL of the server, or `COPY`."""
        return self.call_log_copy.pending()

    async def finish_erasing(self) -> dict[str, int]:
        """Have calls erased on all servers that can be reached; how many are pending on others, by URL. Raises
        CallLogError."""
        async with self._lock:
            self._entries = await replica_urls(self._config.serving)
            await self._finish_erasing()
        pending = await asyncio.to_thread(self.pending)
        return {url: count for url, count in pending.items() if url != COPY}

    async def _finish_erasing(self) -> None:
        """Have calls erased where that is pending. What fails is attempted again at a later pull."""
        now = time.monotonic()
        urls = [url for url in await asyncio.to_thread(self.pending) if now >= self._erase_at.get(url, 0.0)]
        if COPY in urls and not await self._finish_in_copy():
            self._erase_at[COPY] = time.monotonic() + PURGE_AGAIN_SECONDS
        await asyncio.gather(*(self._erase_on(url) for url in urls if url in self._entries))

    async def _finish_in_copy(self) -> bool:
        try:
            return await asyncio.to_thread(self.call_log_copy.finish_erasing, PURGE_SECONDS)
        except CallLogError as error:
            # Pulling goes on without the free disk space that this takes.
            self._warn_of_erasing(COPY, error)
            return False

    def _warn_of_erasing(self, where: str, error: Exception) -> None:
        if ("erase", where) not in self._warned:
            self._warned.add(("erase", where))
            log.warning("%s", error)

    async def _erase_on(self, url: str) -> None:
        try:
            replica = await self._replica(url)
            while ids := await asyncio.to_thread(self.call_log_copy.pending_of, url, IDS_AT_ONCE):
                if self._stopped:
                    return
                if not await replica.erase_calls(ids):
                    self._erase_at[url] = time.monotonic() + PURGE_AGAIN_SECONDS
                    return
                await asyncio.to_thread(self.call_log_copy.have_erased, url, ids)
        except ServeError as error:
            self._erase_at[url] = time.monotonic() + LONGEST_BACKOFF_SECONDS
            self._warn_of_erasing(url, error)
        else:
            self._warned.discard(("erase", url))

    async def pull_soon(self) -> None:
        """Pull again for a trace that waits, unless another one has just done so."""
        async with self._lock:
            pause = self._pulled_at + PAUSE_SECONDS - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        await self.pull(at_once=True)

    def prune(self) -> int:
        """Remove calls that are too old or too many; returns their number. Raises CallLogError."""
        return self.call_log_copy.prune(time.time_ns() - self._settings.keep_ns, self._settings.max_bytes)

    async def _pull(self, url: str, at_once: bool, until: float) -> bool:
        """Pull one server; whether everything that it has recorded is in the copy."""
        assert self._servers is not None
        failures, next_at = self._failures.get(url, (0, 0.0))
        if not at_once and time.monotonic() < next_at:
            return self._servers.get(url, PulledServer(url)).condition == OFF
        try:
            condition = await self._pull_pages(url, until)
        except ServeError as error:
            self._failures[url] = (failures + 1, time.monotonic() + min(2.0**failures, LONGEST_BACKOFF_SECONDS))
            await self._note(url, error.condition, str(error), warn=at_once)
            return False
        self._failures.pop(url, None)
        if condition == OFF:
            self._failures[url] = (0, time.monotonic() + LONGEST_BACKOFF_SECONDS)
            why = "it records no calls: serving.call_log is false there, or it is an earlier version"
            await self._note(url, OFF, why, warn=False)
        return bool(condition)

    async def _pull_pages(self, url: str, until: float) -> str:
        """Pull one server: its condition, empty if its end was not reached."""
        assert self._servers is not None
        replica = await self._replica(url)
        is_first = True
        while not self._stopped and (is_first or time.monotonic() < until):
            server = self._servers.get(url, PulledServer(url))
            if (page := await replica.calls(server.after, PAGE_CALLS)) is None:
                return OFF
            state = page.state
            told = (state.log_id, state.newest, state.dropped, state.refused)
            is_same = told == (server.log_id, server.after, server.log_dropped, server.refused)
            if is_same and server.condition == OK:
                return OK
            if server.after and (state.log_id != server.log_id or state.newest < server.after):
                # Another log, or an older copy of it: it was asked for numbers that it does not have yet.
                if not is_first:
                    hint = f"See whether one server alone answers at {url}. It is asked again."
                    raise ServeError(f"pull calls from {url}", "its log changes while it is read", hint)
                page = await replica.calls(0, PAGE_CALLS) or page
            more = await asyncio.to_thread(self.call_log_copy.store_page, url, page)
            # The server's own settings may lack these names.
            await self.erase_new([call.request_id for _, call in page.calls if self._is_private(call)])
            await asyncio.to_thread(self.prune)
            self._servers = await asyncio.to_thread(self.call_log_copy.servers)
            if server.condition not in ("", OK):
                self._warned.discard(url)
                log.info("%s: its calls are pulled again", url)
            if not more:
                return OK
            is_first = False
        return ""

    def _is_private(self, call: RecordedCall) -> bool:
        return call.user in self._private_users or call.conversation in self._private_conversations

    async def _replica(self, url: str) -> Replica:
        """The client of a server; its key may have been created or changed meanwhile."""
        key = admin_key(self._config, self._entries[url], f"pull calls from {url}")
        connected = self._replicas.get(url)
        if connected is None or connected[0] != key:
            if connected is not None:
                await connected[1].close()
            # The HTTP client is imported only if there is something to pull.
            from flywheel.serving.client.replica_client import Replica

            connected = self._replicas[url] = (key, Replica(url, key))
        return connected[1]

    async def _note(self, url: str, condition: str, error: str, *, warn: bool) -> None:
        """Note the condition of a server that gave no calls; a new one is logged, if a trace waits for its calls
        (`warn`) or it gave some before."""
        assert self._servers is not None
        before = self._servers.get(url, PulledServer(url))
        if before.condition == condition and not (warn and url not in self._warned):
            return
        if warn or before.condition == OK:
            log.warning("%s", error)
            self._warned.add(url)
        await asyncio.to_thread(self.call_log_copy.note, url, condition, error)
        self._servers = await asyncio.to_thread(self.call_log_copy.servers)

    async def reopen_late(self) -> set[int]:
        """Have traces read again whose calls came after they were extracted; the numbers of their sources, and those
        of `reopened`.

        The first time, this looks for all calls that were missing; then for those that were pulled since.
        """
        reopened, self.reopened = self.reopened, set()
        if self._late_to is None:
            state = await asyncio.to_thread(self.call_log_copy.state)
            since = datetime.now(UTC) - timedelta(days=self._settings.keep_days)
            missing = await self._store.read(ledger.missing_calls, since)
            pulled = await asyncio.to_thread(self.call_log_copy.sizes, missing) if missing else {}
            reopened |= await self.reopen(list(pulled))
            self._late_to = state.newest
        elif await asyncio.to_thread(lambda: self.call_log_copy.state().newest) < self._late_to:
            self._late_to = 0  # The file was removed, and a new one began.
        while ids := await asyncio.to_thread(self.call_log_copy.ids_after, self._late_to, IDS_AT_ONCE):
            reopened |= await self.reopen([request_id for _, request_id in ids])
            self._late_to = ids[-1][0]
        return reopened

    async def reopen(self, request_ids: Collection[str]) -> set[int]:
        """Have the traces read again that lacked one of these calls; the numbers of their sources."""
        ids = list(request_ids)
        if not ids or not await self._store.read(ledger.lack_calls, ids):
            return set()
        return set(await self._store.write(ledger.reopen_for_calls, ids))

    async def close(self) -> None:
        """Close the copy and all connections."""
        for _, replica in self._replicas.values():
            await replica.close()
        await asyncio.to_thread(self.call_log_copy.close)
