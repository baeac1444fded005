"""Connections of our own servers: a deadline for each header, a limit of their number, and quiet logs about both.

uvicorn itself only limits the time between two requests, so silent clients could hold descriptors for ever.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flywheel.system.log import log_rarely
from flywheel.system.server_limits import ServerLimits

log = logging.getLogger(__name__)

SHARE_OF_DESCRIPTORS: Final = 4
"""A server uses at most this fraction (1/4) of the file descriptors that the process may open."""
_NO_RESOURCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """The connections of one server that it waits for, the longest waiting first."""

    def __init__(self, limits: ServerLimits) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = limits.connections if soft == resource.RLIM_INFINITY else soft // SHARE_OF_DESCRIPTORS
        self.most = min(limits.connections, share)
        self.seconds = limits.header_seconds
        self.waiting: dict[Protocol, None] = {}


class Protocol(H11Protocol):
    """The server waits for a client that sends its header or its body, or that does not read an answer. The first and
    the last have a deadline here; bodies have theirs in `Limited`."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, others: Connections, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._others = others

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._others.most:
            # Not the new one: a few silent clients would then keep everyone out.
            next(iter(self._others.waiting))._end()
            log_rarely(
                log, "more than %d connections: those that are waited for longest are closed", self._others.most
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._go_on()
            if self.cycle.more_body:
                self._others.waiting[self] = None

    def on_response_complete(self) -> None:
        # Before the base class handles the next request, which may have arrived already.
        self._wait()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # The request was answered before the rest of its body proved to be wrong.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle.response_complete:
            self._wait()
        else:
            self._go_on()

    def _wait(self) -> None:
        self._go_on()
        self._others.waiting[self] = None
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self._others.seconds, self._expired, unread)

    def _go_on(self) -> None:
        self._others.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _expired(self, unread: int) -> None:
        if 0 < self.transport.get_write_buffer_size() < unread:
            self._wait()  # The client is still reading the last answer.
        else:
            self._end()

    def _end(self) -> None:
        self._go_on()
        self.transport.abort()


def handle_accept_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The handler for errors of an event loop. asyncio itself logs hundreds of times a second that connections cannot
    be accepted, each time with a traceback."""
    error, listening = context.get("exception"), context.get("socket")
    if listening is None or not isinstance(error, OSError) or error.errno not in _NO_RESOURCE:
        loop.default_exception_handler(context)
    else:
        host, port, *_ = listening.getsockname()
        log_rarely(log, "connections at %s:%d cannot be accepted: %s. Clients try again.", host, port, error.strerror)
