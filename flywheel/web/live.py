"""Tells open pages by server-sent events that what they show has changed.

A stream looks once a second at the sizes and times of the state's files, and of the files of the round that its page
shows. It reads the state database only to find a round's directory after a change. `static/live.js` then fetches the
page again and brings the elements that are marked `data-live` up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakSet

from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from flywheel.errors import StoreError
from flywheel.records.round import ERROR_FILE, EVALUATION_FILE, LOG_FILE, METRICS_FILE, RESULT_FILE, ROLLOUTS_FILE
from flywheel.store.kernel.schema import rounds
from flywheel.training.data.round_progress import PROGRESS_FILE
from flywheel.web.site import Site, site_of

INTERVAL_SECONDS: Final = 1.0
"""How often a stream looks, and so the most often that a page is told of changes."""
HEARTBEAT_SECONDS: Final = 15.0
"""How often a stream without changes sends something, so that proxies keep it and lost browsers are noticed."""
RETRY_MS: Final = 2_000
"""After how long a browser opens a lost stream again."""
CHANGED: Final = b"event: changed\ndata: 1\n\n"
HEARTBEAT: Final = b": \n\n"
STATE_FILES: Final = ("state.db", "state.db-wal")
ROUND_FILES: Final = (
    METRICS_FILE, PROGRESS_FILE, ROLLOUTS_FILE, EVALUATION_FILE, RESULT_FILE, ERROR_FILE, LOG_FILE,
)  # fmt: skip
PAGES_OF_A_ROUND: Final = frozenset({"rounds", "rollouts", "gate"})
PAGES_OF_THE_LIVE_ROUND: Final = frozenset({"", "rounds", "rollouts"})

Mark = tuple[int, int, int] | None
"""Inode, size and time of change of a file; None if it is missing."""


async def show(request: Request) -> Response:
    """The stream of changes of `page`, the path and query of a page."""
    stream = Stream(site_of(request), request.query_params.get("page", "/"))
    return StreamingResponse(stream.events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def stop() -> None:
    """End the streams of this process, so that its server can stop at once."""
    for stream in list(_open):
        stream.stopped.set()


class Stream:
    """The changes of what one page shows."""

    def __init__(self, site: Site, page: str) -> None:
        self.stopped = asyncio.Event()
        self._site = site
        self._round, self._is_about_live = round_of(page)
        self._directory: Path | None = None
        self._state: tuple[Mark, ...] = ()
        self._files: tuple[Mark, ...] = ()

    async def events(self) -> AsyncIterator[bytes]:
        """What is sent, until the browser leaves or the server stops."""
        _open.add(self)
        await self.has_changed()
        yield f"retry: {RETRY_MS}\n\n".encode()
        quiet = 0.0
        while not await self._waited():
            quiet += INTERVAL_SECONDS
            if await self.has_changed():
                quiet = 0.0
                yield CHANGED
            elif quiet >= HEARTBEAT_SECONDS:
                quiet = 0.0
                yield HEARTBEAT

    async def has_changed(self) -> bool:
        """Whether anything has changed since the last call."""
        before = self._state, self._directory, self._files
        self._state = marks(self._site.config.state_dir, STATE_FILES)
        if self._state != before[0]:
            self._directory = await self._directory_now()
        self._files = marks(self._directory, ROUND_FILES) if self._directory is not None else ()
        return (self._state, self._directory, self._files) != before

    async def _waited(self) -> bool:
        """Wait for the next look; whether the server stops."""
        try:
            await asyncio.wait_for(self.stopped.wait(), INTERVAL_SECONDS)
        except TimeoutError:
            return False
        return True

    async def _directory_now(self) -> Path | None:
        if self._round is None and not self._is_about_live:
            return None
        try:
            found = await self._site.read(partial(_directory_of, self._round))
        except StoreError:
            # The page itself says what is wrong; the state may become readable later.
            return None
        return Path(found) if found else None


_open: Final[WeakSet[Stream]] = WeakSet()


def round_of(page: str) -> tuple[str | None, bool]:
    """The round that a page names, and whether it shows the live round if it names none."""
    try:
        parts = urlsplit(page)
    except ValueError:
        return None, False
    kind, _, rest = parts.path.lstrip("/").partition("/")
    named = unquote(rest.partition("/")[0]) or parse_qs(parts.query).get("round", [""])[0]
    if kind in PAGES_OF_A_ROUND and named:
        return named, False
    return None, kind in PAGES_OF_THE_LIVE_ROUND


def _directory_of(name: str | None, conn: Connection) -> str | None:
    """The directory of a round; without a name, of the unfinished one."""
    which = rounds.c.live == 1 if name is None else rounds.c.name == name
    found: str | None = conn.execute(select(rounds.c.dir).where(which)).scalar_one_or_none()
    return found


def marks(directory: Path, names: tuple[str, ...]) -> tuple[Mark, ...]:
    """What tells whether these files have changed."""
    return tuple(_mark(directory / name) for name in names)


def _mark(path: Path) -> Mark:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
