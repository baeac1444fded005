"""What servers accept from clients: from which hosts, how large a body, how slowly, and how many at once.

`ServerLimits` are the figures. `Limited` applies those about hosts and bodies to any ASGI app, also within vLLM's API
server. `connections` applies the others to servers of our own. Commands load this at their start, so only the
standard library is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES: Final = frozenset({"localhost"})
RETRY_SECONDS: Final = 5
ROOM_SECONDS: Final = 5.0
"""Longest wait of a body for room."""
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::([0-9]{1,5}))?")


class RefusedError(Exception):
    """A request that is refused with `status`, a reason, and more headers."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status = status
        retry = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else {}
        self.headers = {**retry, **(headers or {})}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one server.

    Attributes:
        hosts: The names of the server in `Host` headers; IP addresses are always accepted. None accepts every name: a
            key is needed there.
        host_hint: What to do about a name that is refused.
        body_bytes: Of one body.
        body_hint: What to do about a body that is too long.
        bodies: So many bodies of this length may arrive at once. Where they are more, the oldest one goes on, and
            others wait for a moment.
        bodies_held: So many fit into memory at once, complete or still arriving.
        body_seconds: Longest time from a header to the end of its body.
        header_seconds: Longest time without a complete header, and in which a client reads nothing of an answer.
        connections: At once. The one for which the server has waited longest gives way.
    """

    hosts: frozenset[str] | None = LOCAL_NAMES
    host_hint: str = "Use localhost or an IP address."
    body_bytes: int = 32 * 1024 * 1024
    body_hint: str = "Send less."
    bodies: int = 8
    bodies_held: int = 8
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    connections: int = 512

    def check_host(self, scope: Scope) -> None:
        """Raise RefusedError for a request by a name that is not this server's.

        A web page can have its own name resolve to this machine (DNS rebinding): the browser then sends requests here
        and gives the answers to the page. With an IP address as name that is impossible.
        """
        if self.hosts is None:
            return
        given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == b"host"]
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found and 0 < int(found[3] or 80) < 65_536:
            name = found[1] or found[2].removesuffix(".")
            address = address_of(name)
            if name in self.hosts or (address and not address.is_unspecified):
                return
        host = ", ".join(given)[:100]
        raise RefusedError(421, f"requests for the host {host!r} are refused here. {self.host_hint}")


Refuse = Callable[[Scope, Send, RefusedError], Awaitable[None]]


class Limited:
    """ASGI middleware with the limits on hosts and bodies. `refuse` answers what they, or the app, refuse."""

    def __init__(self, app: App, limits: ServerLimits, refuse: Refuse) -> None:
        self._app = app
        self._limits = limits
        self._refuse = refuse
        self._held = 0
        self._arriving: dict[object, int] = {}
        """The bytes of each body that the app has not read yet, the oldest first."""
        self._has_changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, body = 0, object()
        is_whole = begun = has_left = False
        refusal: RefusedError | None = None
        deadline = asyncio.get_running_loop().time() + self._limits.body_seconds

        async def limited() -> Message:
            """What is refused looks like a disconnect to the app."""
            nonlocal held, is_whole, has_left, refusal
            if is_whole:
                return await receive()
            if refusal:
                return {"type": "http.disconnect"}
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                why = f"the body did not arrive within {self._limits.body_seconds:g} seconds"
                refusal = RefusedError(408, why)
                return {"type": "http.disconnect"}
            has_left = message["type"] == "http.disconnect"
            size = len(message.get("body") or b"")
            held += size
            self._held += size
            self._arriving[body] = held
            if is_whole := not message.get("more_body"):
                self._has_arrived(body)
            if held > self._limits.body_bytes:
                refusal = self._too_long()
            elif size and not (self._fits() and (is_whole or await self._may_go_on(body))):
                refusal = RefusedError(503, "the server holds too many bodies: try again later")
            return {"type": "http.disconnect"} if refusal else message

        async def passed(message: Message) -> None:
            nonlocal begun
            if refusal is None or begun:
                begun = True
                await send(message)

        try:
            self._limits.check_host(scope)
            length = header(scope, b"content-length")
            if length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
                raise self._too_long()
            await self._app(scope, limited, passed)
        except RefusedError as error:
            refusal = error
        except Exception:
            # Apps report it as an error where a client leaves within its body.
            if begun or not (refusal or has_left):
                raise
        finally:
            self._held -= held
            self._has_arrived(body)
        if refusal is not None and not begun:
            await self._refuse(scope, send, refusal)

    def _fits(self) -> bool:
        return self._held <= self._limits.bodies_held * self._limits.body_bytes

    async def _may_go_on(self, body: object) -> bool:
        """Whether more of a body may arrive, perhaps after a moment."""
        most = self._limits.bodies * self._limits.body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_SECONDS):
                while sum(self._arriving.values()) > most and next(iter(self._arriving)) is not body:
                    self._has_changed.clear()
                    await self._has_changed.wait()
                return True
        return False

    def _has_arrived(self, body: object) -> None:
        self._arriving.pop(body, None)
        self._has_changed.set()

    def _too_long(self) -> RefusedError:
        return RefusedError(
            413, f"the body is longer than {self._limits.body_bytes:,} bytes. {self._limits.body_hint}"
        )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host in LOCAL_NAMES if address is None else address.is_loopback


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


async def respond(
    send: Send, status: int, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer."""
    given = {"content-type": media_type, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def refuse_in_text(scope: Scope, send: Send, refusal: RefusedError) -> None:
    await respond(send, refusal.status, f"{refusal}\n".encode(), "text/plain; charset=utf-8", refusal.headers)
