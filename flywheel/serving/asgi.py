"""ASGI building blocks of the middleware: types, headers, bodies with a size limit, and short responses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_LENGTH = (b"content-length", b"transfer-encoding")


class RefusedError(Exception):
    """A request that is refused with `status` and a reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def too_long(limit: int) -> RefusedError:
    return RefusedError(413, f"the body is longer than the {limit:,} bytes that are taken here (serving.max_body_mb)")


def route_path(scope: Scope) -> str:
    """The path for the server's routes, without the root path, as Starlette removes it."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if rest.startswith("/") or not rest else path


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def with_header(scope: Scope, name: bytes, value: bytes | None) -> Scope:
    """The same request with this header exactly once, or without it."""
    headers = [(key, old) for key, old in scope["headers"] if key.lower() != name]
    return {**scope, "headers": headers if value is None else [*headers, (name, value)]}


def is_json(scope: Scope) -> bool:
    media = header(scope, b"content-type").split(b";")[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None when the client disconnects before its end. Raises RefusedError for one longer than
    `limit`."""
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > limit:
            raise too_long(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def parsed(body: bytes) -> Any:
    """The JSON of a body. Raises RefusedError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is no JSON, or nested too deeply") from None


async def with_body(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Call the app with a request whose body was already read."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _LENGTH]
    headers.append((b"content-length", str(len(body)).encode()))
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    await app({**scope, "headers": headers}, replay, send)


async def within(limit: int, app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the app with a streamed body. A body longer than `limit` is answered with 413, unless the app has started
    to answer."""
    length = 0
    begun = False

    async def counted() -> Message:
        nonlocal length
        message = await receive()
        length += len(message.get("body") or b"")
        return message if length <= limit else {"type": "http.disconnect"}

    async def passed(message: Message) -> None:
        nonlocal begun
        if length <= limit or begun:
            begun = True
            await send(message)

    try:
        await app(scope, counted, passed)
    except Exception:
        # For the app this looks like a disconnect, which some apps report as an error.
        if length <= limit or begun:
            raise
    if length > limit and not begun:
        await refuse(send, too_long(limit))


def changed(send: Send, when: Collection[int], change: Callable[[int, bytes], tuple[int, bytes]]) -> Send:
    """A `send` that holds back answers with a status of `when`, and sends what `change` makes of status and body."""
    parts: list[bytes] = []
    status = 0

    async def held(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start" and message["status"] in when:
            status = message["status"]
        elif not status or message["type"] != "http.response.body":
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await answer_json(send, *change(status, b"".join(parts)))

    return held


async def refuse(send: Send, refusal: RefusedError) -> None:
    await answer_json(send, refusal.status, error_json(refusal.status, str(refusal)))


def error_json(status: int, why: str) -> bytes:
    """An error in OpenAI's format, so that every client shows the message."""
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    return json.dumps({"error": {"message": why, "type": kind, "param": None, "code": status}}).encode()


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    await answer_json(send, status, json.dumps(content).encode())


async def answer_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
