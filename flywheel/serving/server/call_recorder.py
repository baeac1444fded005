"""Records requests to the alias and their responses in the call log, without delaying them.

The event loop collects what passes and appends it to a queue; a thread writes the queue to the log. What does not fit
into the queue, or cannot be written, is dropped and counted. Only the standard library and msgspec are imported, and
modules that do the same.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from msgspec.structs import replace

from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.call_log_page import fits_a_page
from flywheel.serving.server.asgi import with_body
from flywheel.system.server_limits import App, Message, Receive, Scope, Send, header

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 64_000_000
MAX_QUEUED_CALLS: Final = 10_000
BATCH_BYTES: Final = 4_000_000
"""Bytes after which a transaction ends."""
GATHER_SECONDS: Final = 0.1
"""How long a batch is gathered: one transaction for many calls costs the server less."""
PRUNE_SECONDS: Final = 300.0
PRUNED_AT_ONCE: Final = 500
"""Calls that are pruned before the queue is looked at again."""
QUIET_SECONDS: Final = 3600.0
"""Time between two lines about a log that cannot be written."""
FLUSH_SECONDS: Final = 10.0
"""Maximum time that a shutdown waits for the queue to be written."""
_DAY_NS: Final = 86_400 * 10**9
_CHUNK_BYTES: Final = 64
"""What a chunk of a response takes in memory besides its content."""
RETRY_HEADER: Final = b"x-stainless-retry-count"
"""In requests of OpenAI's clients."""


def credential_of(key: bytes) -> str:
    """A short hash of the Authorization header, the same on every server; empty without one."""
    return hashlib.blake2b(key, digest_size=8, person=b"flywheel").hexdigest() if key else ""


def retries_of(scope: Scope) -> int:
    """How often the client has tried the request before, as it says."""
    retry = header(scope, RETRY_HEADER)
    return int(retry) if retry.isdigit() and len(retry) < 9 else 0


@dataclass(slots=True)
class CallInProgress:
    """A request while it is answered: what is recorded of it so far, and the chunks of its response."""

    call: RecordedCall
    chunks: list[bytes] = field(default_factory=list)
    is_abandoned: bool = False
    size: int = 0
    """What it takes in memory, in bytes."""

    def __post_init__(self) -> None:
        self.size = len(self.call.request)

    def sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            media_type: bytes = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            media_type = media_type.split(b";")[0].strip().lower()
            self.call = replace(self.call, status=message["status"], media_type=media_type.decode("latin-1"))
        elif message["type"] == "http.response.body":
            if chunk := message.get("body"):
                self.size += len(chunk) + _CHUNK_BYTES
                self.chunks.append(chunk)
                if self.size > MAX_QUEUED_BYTES:
                    self.chunks.clear()  # It will not fit into the queue.
            if not message.get("more_body") and not self.is_abandoned:
                self.call = replace(self.call, is_complete=True, ended_ns=time.time_ns())

    def as_recorded(self) -> RecordedCall:
        return replace(self.call, response=b"".join(self.chunks))


class Erasure(NamedTuple):
    """How many calls were erased, and whether no trace of them is left in the log's files."""

    erased: int
    is_purged: bool


class CallRecorder:
    """Writes one log. The event loop calls `recorded`; its thread does the rest."""

    def __init__(self, path: Path, keep_days: float, max_bytes: int) -> None:
        self.path = path
        self._log = CallLog(path)
        self._keep_ns = int(keep_days * _DAY_NS)
        self._max_bytes = max_bytes
        self._batch_bytes = min(BATCH_BYTES, max_bytes // 4)
        self._queue: deque[CallInProgress] = deque()
        self._erasures: deque[tuple[Sequence[str], Future[Erasure]]] = deque()
        self._awake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # Only one thread changes each of these numbers, so they need no lock.
        self._queued_bytes = self._taken_bytes = 0
        self._refused = self._lost = self._counted = 0
        self._not_to_record = self._not_recorded = 0
        self._warned = self._pruned = float("-inf")

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """By `ServerSettings.call_log`."""
        return cls(Path(settings["path"]), settings["keep_days"], settings["max_bytes"]) if settings else None

    @property
    def uncounted(self) -> int:
        """Calls that were dropped and are not counted in the file yet."""
        return self._refused + self._lost - self._counted

    async def recorded(
        self, call: RecordedCall, app: App, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Call the app with a request whose body was already read, and record its response."""
        progress = CallInProgress(call)

        async def received() -> Message:
            message = await receive()
            progress.is_abandoned |= message["type"] == "http.disconnect"
            return message

        async def passed(message: Message) -> None:
            await send(message)
            progress.sent(message)

        try:
            await with_body(app, scope, body, received, passed)
        finally:
            if not progress.call.ended_ns:
                progress.call = replace(progress.call, ended_ns=time.time_ns())
            self._put(progress)

    def refuse(self) -> None:
        """Count a request that is not to be recorded."""
        self._not_to_record += 1
        self._wake()

    def erase(self, request_ids: Sequence[str]) -> Future[Erasure]:
        """Have calls erased by the thread that writes, so that no recorded call waits for a lock of the file. Calls
        that are in the queue or still answered are not recorded. The result may be a CallLogError."""
        result: Future[Erasure] = Future()
        self._erasures.append((request_ids, result))
        self._wake()
        return result

    def close(self) -> None:
        """Write what is queued and stop."""
        self._is_closing = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(FLUSH_SECONDS)

    def _put(self, call: CallInProgress) -> None:
        queued = self._queued_bytes - self._taken_bytes
        too_large = queued + call.size > MAX_QUEUED_BYTES or call.size > self._max_bytes
        if too_large or len(self._queue) >= MAX_QUEUED_CALLS:
            self._refused += 1
        else:
            self._queued_bytes += call.size
            self._queue.append(call)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flywheel-call-log", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        while True:
            self._awake.wait(PRUNE_SECONDS)
            if not self._is_closing:
                time.sleep(GATHER_SECONDS)
            # In this order, whatever is queued or said from here on wakes the thread again.
            self._awake.clear()
            is_last = self._is_closing
            while self._queue:
                self._write(list(self._batch()))
            if self._not_to_record > self._not_recorded or (is_last and self.uncounted):
                self._write([])
            while self._erasures:
                self._erase(*self._erasures.popleft())
            if is_last:
                self._log.close()
                return
            self._prune()

    def _batch(self) -> Iterator[CallInProgress]:
        size = 0
        while self._queue and size < self._batch_bytes:
            call = self._queue.popleft()
            size += call.size
            yield call

    def _write(self, batch: list[CallInProgress]) -> None:
        size = sum(call.size for call in batch)
        calls = [call for call in (progress.as_recorded() for progress in batch) if fits_a_page(call)]
        self._lost += len(batch) - len(calls)
        dropped, refused = self.uncounted, self._not_to_record
        try:
            with self._log.transaction():
                # Before it is exceeded: clients can fill the log faster than a timer would empty it.
                self._log.prune(0, self._max_bytes - size)
                self._log.append(calls, dropped, refused - self._not_recorded)
            self._counted += dropped
            self._not_recorded = refused
        except Exception as error:
            self._lost += len(calls)
            self._warn("requests are served, but not recorded", error)
        self._taken_bytes += size

    def _erase(self, request_ids: Sequence[str], result: Future[Erasure]) -> None:
        if not result.set_running_or_notify_cancel():
            return  # The client has left, and asks again.
        try:
            result.set_result(Erasure(self._log.erase(request_ids), self._log.purge()))
        except Exception as error:
            result.set_exception(error)

    def _prune(self) -> None:
        if time.monotonic() - self._pruned < PRUNE_SECONDS:
            return
        try:
            removed = self._log.prune(time.time_ns() - self._keep_ns, self._max_bytes, PRUNED_AT_ONCE)
        except Exception as error:
            self._warn("old calls stay recorded", error)
            removed = 0
        if removed < PRUNED_AT_ONCE:
            self._pruned = time.monotonic()
        else:
            self._awake.set()

    def _warn(self, what: str, error: Exception) -> None:
        if time.monotonic() - self._warned > QUIET_SECONDS:
            self._warned = time.monotonic()
            log.error("%s: %s", what, error)
