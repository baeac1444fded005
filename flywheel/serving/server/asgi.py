"""ASGI building blocks of the middleware: paths, headers, the JSON of requests, and answers in JSON.

Nothing wraps an answer: Starlette's `BaseHTTPMiddleware` takes 60 µs for each chunk of a streamed one. Modules that
run inside vLLM's process import the standard library, Starlette and msgspec, which vLLM itself needs, and modules of
Flywheel that do the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from flywheel.serving.server.version_assignment import MEMBERS
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
MAX_BYTES: Final = 65536
"""Of a request to an endpoint that manages the server."""
T = TypeVar("T")
MAX_DEPTH: Final = 100
"""Maximum nesting depth of a body. vLLM and chat templates recurse through objects and lists, and fail with a 500 at
Python's recursion limit."""
MAX_CONTAINERS: Final = 50_000
"""Maximum number of objects and lists in the object of a body. A message has two to five; vLLM takes up to a second
to refuse 10,000 that are none."""
MAX_KEYS: Final = 1000
"""Maximum number of top-level keys."""
MAX_MODEL_KEYS: Final = 4
"""Maximum number of `model` keys; the last one counts."""
# The first alternative is for texts without an escaped quotation mark, and takes a tenth of the time. A text without
# an end ends with the body, so that nothing is looked at twice.
_TEXT: Final = rb'(?:"[^"]*+"(?<!\\")|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)'
_without_texts: Final = re.compile(_TEXT, re.DOTALL).sub
_to_bracket: Final = re.compile(rb'(?:[^][{}"]++|' + _TEXT + rb")*+[][{}]", re.DOTALL).match
_NAMES: Final = ("model", "user_id", *sorted(MEMBERS))


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


async def json_of(request: Request, kind: type[T], form: str) -> T:
    """The JSON of a request, which has the form of `kind`: `form` says which. Raises RefusedError and
    ClientDisconnect."""
    body = await request.body()
    if len(body) > MAX_BYTES:
        raise RefusedError(413, f"the body is longer than {MAX_BYTES:,} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        why = f"expected {form}, as JSON without halves of surrogate pairs: {error}"
        raise RefusedError(400, why) from None


_pairs: Final = json.JSONDecoder(object_pairs_hook=list).decode


_Members: Final = msgspec.defstruct("_Members", [(name, msgspec.Raw, msgspec.Raw()) for name in _NAMES])
"""The members of objects in requests that are read. Others are checked, and not built."""


def in_utf8(body: bytes) -> bytes:
    """JSON in any encoding that `json.loads` reads, in UTF-8. Raises ValueError."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


def members(text: bytes) -> dict[str, msgspec.Raw]:
    """The JSON of members of an object in UTF-8, of several with one name the last; none of another value. Raises
    ValueError for what is no JSON."""
    try:
        found = msgspec.structs.asdict(msgspec.json.decode(text, type=_Members))
        return {name: raw for name, raw in found.items() if raw}
    except msgspec.ValidationError:
        return {}
    except msgspec.DecodeError:
        # The server reads more than msgspec does: NaN, and halves of surrogate pairs.
        read = json.loads(text)
        known = read.items() if isinstance(read, dict) else ()
        return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in known if name in _NAMES}


def models_in(text: bytes) -> list[object]:
    """The values of all members `model` of an object in UTF-8; None stands for objects and lists.

    Only brackets take steps of Python. Raises RefusedError for an object that is nested too deeply, or has too many
    keys, objects or lists, and ValueError where this shows that it is none.
    """
    at = depth = containers = 0
    outer = [b"{"]  # The object, with null in place of the objects and lists in it.
    while found := _to_bracket(text, at):
        at = found.end()
        is_opened = text[at - 1] in b"[{"
        if depth == 1:
            outer.append(found[0][:-1] + b"null" if is_opened else found[0])
        if is_opened:
            containers += depth > 0
            depth += 1
            if depth > MAX_DEPTH:
                raise RefusedError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
            if containers > MAX_CONTAINERS:
                raise RefusedError(400, f"the body has more than {MAX_CONTAINERS:,} objects and lists")
        else:
            depth -= 1
            if depth < 1:
                break
    else:
        outer.append(text[at:])
    # A member has at most two texts there.
    if _without_texts(b"", b"".join(outer), 2 * MAX_KEYS).count(b":") > MAX_KEYS:
        raise RefusedError(400, f"the body has more than {MAX_KEYS:,} keys")
    if depth:
        raise ValueError("the text is cut off")
    models = [value for key, value in _pairs(b"".join(outer).decode("utf-8", "surrogatepass")) if key == "model"]
    if len(models) > MAX_MODEL_KEYS:
        raise RefusedError(400, f"the body has more than {MAX_MODEL_KEYS} `model` keys")
    return models


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


async def answer_json(send: Send, status: int, body: bytes) -> None:
    headers = {"retry-after": str(RETRY_SECONDS)} if status == 503 else None
    await respond(send, status, body, "application/json", headers)
