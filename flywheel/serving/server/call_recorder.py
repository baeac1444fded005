"""Records requests to the alias and their responses in the call log, without delaying them.

The event loop collects what passes and appends it to a queue; a thread writes the queue to the log. What does not fit
into the queue, or cannot be written, is dropped and counted. Only the standard library is imported, and modules that
do the same.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from flywheel.serving.calls.call_log import CallLog, RecordedCall, fits_a_page
from flywheel.serving.environment_variables import CALL_LOG_VARIABLE
from flywheel.serving.server.asgi import with_body
from flywheel.system.server_limits import App, Message, Receive, Scope, Send

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
"""How often OpenAI's clients have tried the request before."""


@dataclasses.dataclass(slots=True)
class CallInProgress:
    """A request while it is answered. `key` and `retry` are the client's headers."""

    request_id: str
    path: str
    version: str
    key: bytes
    retry: bytes
    request: bytes
    started_ns: int
    ended_ns: int = 0
    status: int = 0
    is_complete: bool = False
    is_abandoned: bool = False
    media_type: bytes = b""
    chunks: list[bytes] = dataclasses.field(default_factory=list)
    size: int = 0
    """What it takes in memory, in bytes."""

    def __post_init__(self) -> None:
        self.size = len(self.request)

    def received(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.is_abandoned = True

    def sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            self.media_type = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        elif message["type"] == "http.response.body":
            if chunk := message.get("body"):
                self.size += len(chunk) + _CHUNK_BYTES
                self.chunks.append(chunk)
                if self.size > MAX_QUEUED_BYTES:
                    self.chunks.clear()  # It will not fit into the queue.
            if not message.get("more_body") and not self.is_abandoned:
                self.is_complete = True
                self.ended_ns = time.time_ns()

    def as_recorded(self) -> RecordedCall:
        credential = hashlib.blake2b(self.key, digest_size=8, person=b"flywheel").hexdigest()
        return RecordedCall(
            request_id=self.request_id,
            path=self.path,
            version=self.version,
            credential=credential if self.key else "",
            retry=int(self.retry) if self.retry.isdigit() and len(self.retry) < 9 else 0,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            status=self.status,
            is_complete=self.is_complete,
            media_type=self.media_type.split(b";")[0].strip().lower().decode("latin-1"),
            request=self.request,
            response=b"".join(self.chunks),
        )


class CallRecorder:
    """Writes one log. The event loop calls `recorded`; its thread does the rest."""

    def __init__(self, path: Path, keep_days: float, max_bytes: int) -> None:
        self.path = path
        self._log = CallLog(path)
        self._keep_ns = int(keep_days * _DAY_NS)
        self._max_bytes = max_bytes
        self._batch_bytes = min(BATCH_BYTES, max_bytes // 4)
        self._queue: deque[CallInProgress] = deque()
        self._awake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # Only one thread changes each of these numbers, so they need no lock.
        self._queued_bytes = self._taken_bytes = 0
        self._refused = self._lost = self._counted = 0
        self._warned = self._pruned = float("-inf")

    @classmethod
    def of_environment(cls) -> Self | None:
        """None if the log is off."""
        settings = json.loads(os.environ.get(CALL_LOG_VARIABLE) or "null")
        return cls(Path(settings["path"]), settings["keep_days"], settings["max_bytes"]) if settings else None

    @property
    def uncounted(self) -> int:
        """Calls that were dropped and are not counted in the file yet."""
        return self._refused + self._lost - self._counted

    async def recorded(
        self, call: CallInProgress, app: App, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Call the app with a request whose body was already read, and record its response."""

        async def received() -> Message:
            message = await receive()
            call.received(message)
            return message

        async def passed(message: Message) -> None:
            await send(message)
            call.sent(message)

        try:
            await with_body(app, scope, body, received, passed)
        finally:
            call.ended_ns = call.ended_ns or time.time_ns()
            self._put(call)

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
            if is_last:
                if self.uncounted:
                    self._write([])
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
        calls = [call for call in (each.as_recorded() for each in batch) if fits_a_page(call)]
        self._lost += len(batch) - len(calls)
        dropped = self.uncounted
        try:
            with self._log.transaction():
                # Before it is exceeded: clients can fill the log faster than a timer would empty it.
                self._log.prune(0, self._max_bytes - size)
                self._log.append(calls, dropped)
            self._counted += dropped
        except Exception as error:
            self._lost += len(calls)
            self._warn("requests are served, but not recorded", error)
        self._taken_bytes += size

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
