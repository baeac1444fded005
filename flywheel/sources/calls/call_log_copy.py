"""The daemon's copy of the call logs of all servers, and how far each of them was read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from flywheel.records.model_call import ModelCall
from flywheel.serving.calls.call_log import CallLog
from flywheel.serving.calls.call_log_page import Page
from flywheel.sources.calls.parsing import parse

OK: Final = "ok"
OFF: Final = "off"
"""Conditions of servers: calls are pulled, or the server records none. Others are those of errors."""


@dataclass(frozen=True, slots=True)
class PulledServer:
    """How far the log of one server was read, and what of it is missing.

    `after` is the number of the last call that was read of the log `log_id`. `calls` counts those that were stored,
    `missed` those that the server had pruned before, and `dropped` those that it could not record. `condition` is
    empty before the first answer.
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


_SERVERS: Final = f"SELECT {', '.join(PulledServer.__slots__)} FROM servers"  # noqa: S608 - constants


def call_log_copy_path(state_dir: Path) -> Path:
    return state_dir / "calls" / "calls.db"


def pulled_servers(path: Path) -> dict[str, PulledServer]:
    """Every server that was ever asked, by URL, for a look at the file beside the process that writes it. Nothing, if
    there is no such file or it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(_SERVERS).fetchall()
    except sqlite3.Error:
        return {}
    return {row[0]: PulledServer(*row) for row in rows}


class CallLogCopy(CallLog):
    """The calls of all servers in one file; a call that is pulled twice is stored once."""

    extra_tables: ClassVar = (
        "CREATE TABLE IF NOT EXISTS servers (url TEXT PRIMARY KEY, log_id TEXT NOT NULL, after INTEGER NOT NULL, "
        "calls INTEGER NOT NULL, missed INTEGER NOT NULL, dropped INTEGER NOT NULL, log_dropped INTEGER NOT NULL, "
        "condition TEXT NOT NULL, error TEXT NOT NULL)",
    )

    def servers(self) -> dict[str, PulledServer]:
        """Every server that was ever asked, by URL."""
        with self.reading() as connection:
            rows = connection.execute(_SERVERS).fetchall()
        return {row[0]: PulledServer(*row) for row in rows}

    def store_page(self, url: str, page: Page) -> bool:
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
                    server.missed + max(0, first - after - 1),
                    server.dropped + max(0, log.dropped - (server.log_dropped if is_same else 0)),
                    log.dropped,
                    OK,
                ),
            )
        return last < log.newest

    def note(self, url: str, condition: str, error: str = "") -> None:
        """Note the condition of a server that gave no page."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO servers VALUES (?, '', 0, 0, 0, 0, 0, ?, ?) "
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
            return [(int(found), str(request_id)) for found, request_id in connection.execute(query, (number, limit))]


def _server(connection: sqlite3.Connection, url: str) -> PulledServer:
    row = connection.execute(f"{_SERVERS} WHERE url = ?", (url,)).fetchone()
    return PulledServer(*row) if row else PulledServer(url)


def _store(connection: sqlite3.Connection, server: PulledServer) -> None:
    values = [getattr(server, name) for name in PulledServer.__slots__]
    connection.execute(f"INSERT OR REPLACE INTO servers VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608
