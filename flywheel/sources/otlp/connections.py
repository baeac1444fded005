"""Connections to the receiver: how many there are, and how long one may be without a request.

The web server has a limit for the time between two requests, and none for the time before the first or within its
header: connections that say nothing would hold descriptors for ever, and the daemon's databases need some too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_SECONDS: Final = 10.0
"""Longest time before the first request, between two, and from the first byte of a header to its last."""
MAX_CONNECTIONS: Final = 512
SHARE_OF_DESCRIPTORS: Final = 4
"""A receiver takes no more than a quarter of the descriptors that the process may have."""
TOLD_SECONDS: Final = 60.0
"""How often it is logged, at most, that there are too many connections, or no descriptors for them."""


def max_connections() -> int:
    """Connections at a time to one receiver."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // SHARE_OF_DESCRIPTORS)


class LogRateLimit:
    """Says whether something may be logged again."""

    def __init__(self, seconds: float = TOLD_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last: float | None = None

    def allows(self) -> bool:
        now = self._clock()
        if self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Protocol(H11Protocol):
    """A connection with a deadline for each header. Those beyond the limit are closed at once."""

    too_many = LogRateLimit()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            if self.too_many.allows():
                log.warning("more than %d connections to the receiver: others are closed", max_connections())
            transport.abort()
        else:
            self._begin_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_waiting()

    def on_response_complete(self) -> None:
        # Before the next request, which may have come already, is looked at.
        self._begin_waiting()
        super().on_response_complete()

    def _begin_waiting(self) -> None:
        self._end_waiting()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def tell_refused_accepts(loop: asyncio.AbstractEventLoop, where: str, fileno: int) -> None:
    """Log at a rate that no connection can be accepted at a socket; asyncio logs it hundreds of times a second."""
    before = loop.get_exception_handler() or (lambda loop, context: loop.default_exception_handler(context))
    rate = LogRateLimit()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> Any:
        error, socket = context.get("exception"), context.get("socket")
        if not isinstance(error, OSError) or error.errno not in _NO_RESOURCE:
            return before(loop, context)
        if socket is None or socket.fileno() != fileno:
            return before(loop, context)
        if rate.allows():
            log.error("connections at %s cannot be accepted: %s; senders try again", where, error.strerror)
        return None

    loop.set_exception_handler(handle)


_NO_RESOURCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
