"""The alias middleware: pure ASGI, inside vLLM's API server (`--middleware`), so a swap costs no extra hop.

It rewrites the `model` of a request from an alias to what the alias stands for at that moment, once, before the
request reaches vLLM: a request under way keeps its version, and the answer's `model` says which one it was. Answers
are not touched, except that the list of models names the aliases too. `/flywheel/alias` shows and sets them.
Only the standard library is imported (and what this package has that does the same).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any

from flywheel.serving.aliases import AliasTable, Target, TargetMismatchError

ALIAS_VARIABLE = "FLYWHEEL_ALIAS"
BASE_VARIABLE = "FLYWHEEL_BASE_MODEL"
FILE_VARIABLE = "FLYWHEEL_ALIAS_FILE"
LOADED_VARIABLE = "FLYWHEEL_LOADED_ADAPTERS"
KEY_VARIABLE = "VLLM_API_KEY"

ADMIN_PATH = "/flywheel/alias"
MODELS_PATH = "/v1/models"
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Where vLLM 0.32 asks for the key."""
OWNER = "flywheel"
"""`owned_by` of the aliases in the list of models."""
MAX_ADMIN_BYTES = 65536

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_value = json.JSONDecoder().raw_decode
_SPACE = " \t\n\r"


def rewrite_model(body: bytes, resolve: Callable[[str], str | None]) -> bytes:
    """`body` with the top-level `model` of its JSON object replaced where `resolve` gives another name.

    Every other byte stays: the value is spliced, the document is never written anew. What is not a JSON object is
    returned as it is; refusing it is the server's business. The encodings are those that the server reads as well.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body.decode(encoding, "surrogatepass")
        spans = [(start, end, resolve(model)) for start, end, model in _model_spans(text)]
    except (ValueError, IndexError, RecursionError):
        return body
    found = [(start, end, target) for start, end, target in spans if target is not None]
    if not found:
        return body
    for start, end, target in reversed(found):
        text = text[:start] + json.dumps(target) + text[end:]
    return text.encode(encoding, "surrogatepass")


def _model_spans(text: str) -> Iterable[tuple[int, int, str]]:
    """Where the values of top-level `model` keys lie that are strings, and what they say.

    Raises JSONDecodeError or IndexError where the text is not one JSON object.
    """
    at = _skip_space(text, 0)
    if text[at] != "{":
        return
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        if text[at] != '"':
            raise JSONDecodeError("expected a key", text, at)
        key, at = _value(text, at)
        at = _skip_space(text, at)
        if text[at] != ":":
            raise JSONDecodeError("expected a colon", text, at)
        start = _skip_space(text, at + 1)
        value, end = _value(text, start)
        if key == "model" and isinstance(value, str):
            yield start, end, value
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


class AliasMiddleware:
    """Built by vLLM without arguments beside the app: its settings come from the environment that `flywheel serve`
    sets."""

    def __init__(self, app: App) -> None:
        self._app = app
        file = os.environ.get(FILE_VARIABLE)
        alias = os.environ.get(ALIAS_VARIABLE)
        self._aliases = AliasTable(
            [alias] if alias else [],
            os.environ.get(BASE_VARIABLE, ""),
            Path(file) if file else None,
            json.loads(os.environ.get(LOADED_VARIABLE) or "[]"),
        )
        key = os.environ.get(KEY_VARIABLE)
        self._key = _digest(key.encode()) if key else None
        self._started = int(time.time())
        # By it a client knows that the server was started anew.
        self._instance = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == ADMIN_PATH:
            return await self._administer(scope, receive, send)
        # What will be refused for want of a key is not worth buffering.
        if self._authorized(scope) or not path.startswith(GUARDED):
            # Wherever a request can name a model it can name the alias: also /tokenize and /v2/….
            if scope["method"] == "POST" and _is_json(scope["headers"]):
                return await self._rewrite(scope, receive, send)
            if scope["method"] == "GET" and path == MODELS_PATH:
                return await self._app(scope, receive, self._listing(send))
        await self._app(scope, receive, send)

    async def _rewrite(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return  # The client left before it had said what it wanted.
        # From here on the request belongs to one version: nothing is awaited between the look-up and the app.
        body = rewrite_model(body, self._aliases.resolve)
        replaced = (b"content-length", b"transfer-encoding")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in replaced]
        headers.append((b"content-length", str(len(body)).encode()))
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app({**scope, "headers": headers}, replay, send)

    def _listing(self, send: Send) -> Send:
        """A `send` that holds the list of models back until it is whole and adds the aliases to it."""
        start: Message = {}
        parts: list[bytes] = []

        async def held(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            if message["type"] != "http.response.body":
                return await send(message)
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = self._with_aliases(b"".join(parts)) if start["status"] == 200 else b"".join(parts)
            headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return held

    def _with_aliases(self, body: bytes) -> bytes:
        try:
            listing = json.loads(body)
            cards = listing["data"]
            cards += [
                {"id": alias, "object": "model", "created": self._started, "owned_by": OWNER, "root": target.name}
                for alias, target in self._aliases.targets.items()
            ]
            return json.dumps(listing).encode()
        except (ValueError, KeyError, TypeError):
            return body

    async def _administer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._authorized(scope):
            return await _answer(send, 401, {"error": "wrong or missing key"})
        if scope["method"] == "GET":
            targets = self._aliases.targets
            return await _answer(
                send,
                200,
                {
                    "aliases": {alias: target.name for alias, target in targets.items()},
                    "paths": {target.name: target.path for target in targets.values() if target.path},
                    "digests": {target.name: target.sha256 for target in targets.values() if target.sha256},
                    "base_model": self._aliases.base_model,
                    "instance": self._instance,
                },
            )
        if scope["method"] != "PUT":
            return await _answer(send, 405, {"error": "GET shows the aliases, PUT sets one"})
        body = await _read(receive, MAX_ADMIN_BYTES)
        try:
            wanted = json.loads(body or b"")
            alias, target = wanted["alias"], wanted["target"]
            path, sha256, expected = (wanted.get(key) for key in ("path", "sha256", "expected"))
            texts = isinstance(alias, str) and isinstance(target, str)
            if not (texts and all(isinstance(value, str | None) for value in (path, sha256, expected))):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            return await _answer(
                send, 400, {"error": "expected {alias, target, path?, sha256?, expected?}, all texts"}
            )
        if not alias or not target or alias in (target, self._aliases.base_model):
            return await _answer(send, 400, {"error": "an alias must have a name of its own"})
        try:
            previous = await self._aliases.point(alias, Target(target, path, sha256), expected)
        except TargetMismatchError as mismatch:
            return await _answer(send, 409, {"error": f"{alias} is {mismatch.current}", "target": mismatch.current})
        except OSError as error:
            return await _answer(send, 500, {"error": f"the alias file cannot be written: {error}"})
        await _answer(send, 200, {"alias": alias, "target": target, "previous": previous})

    def _authorized(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        scheme, _, key = _header(scope["headers"], b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(key), self._key)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key.lower() == name), b"")


def _is_json(headers: Headers) -> bool:
    media = _header(headers, b"content-type").split(b";")[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))


async def _read(receive: Receive, limit: int | None = None) -> bytes | None:
    """The whole body; None when the client disconnects within it or it is longer than `limit`."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if limit is not None and sum(map(len, parts)) > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
