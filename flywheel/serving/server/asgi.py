"""ASGI building blocks of the middleware: paths, headers, requests whose body was read, and answers in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from flywheel.system.server_limits import (
    RETRY_SECONDS,
    App,
    Message,
    Receive,
    RefusedError,
    Scope,
    Send,
    header,
    respond,
)

_LENGTH = (b"content-length", b"transfer-encoding")


def route_path(scope: Scope) -> str:
    """The path for the server's routes, without the root path, as Starlette removes it."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if rest.startswith("/") or not rest else path


def with_header(scope: Scope, name: bytes, value: bytes | None) -> Scope:
    """The same request with this header exactly once, or without it."""
    headers = [(key, old) for key, old in scope["headers"] if key.lower() != name]
    return {**scope, "headers": headers if value is None else [*headers, (name, value)]}


def is_json(scope: Scope) -> bool:
    media = header(scope, b"content-type").split(b";")[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))


def parsed(body: bytes, limit: int) -> Any:
    """The JSON of a body of at most `limit` bytes. Raises RefusedError."""
    if len(body) > limit:
        raise RefusedError(413, f"the body is longer than {limit:,} bytes")
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # Lone surrogates cannot be written to a file.
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is no JSON, nested too deeply, or holds half of a surrogate pair") from None
    return found


async def with_body(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Call the app with a request whose body was already read."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _LENGTH]
    headers.append((b"content-length", str(len(body)).encode()))
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    await app({**scope, "headers": headers}, replay, send)


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


async def refuse(scope: Scope, send: Send, refusal: RefusedError) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)})
    challenge = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    body = error_json(refusal.status, str(refusal))
    await respond(send, refusal.status, body, "application/json", {**challenge, **refusal.headers})


def error_json(status: int, why: str) -> bytes:
    """An error in OpenAI's format, so that every client shows the message."""
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    kind = "server_error" if status >= 500 else kind
    return json.dumps({"error": {"message": why, "type": kind, "param": None, "code": status}}).encode()


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    await answer_json(send, status, json.dumps(content).encode())


async def answer_json(send: Send, status: int, body: bytes) -> None:
    headers = {"retry-after": str(RETRY_SECONDS)} if status == 503 else None
    await respond(send, status, body, "application/json", headers)
