"""The management endpoints: reading and setting the alias at /flywheel/alias, and pages of the call log at
/flywheel/calls.

Requests have been authenticated with the admin key.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import parse_qs

from flywheel.errors import CallLogError
from flywheel.serving import routes
from flywheel.serving.calls.call_log import PAGE_BYTES, CallLog
from flywheel.serving.server.alias_table import AliasTable, Target, TargetMismatchError
from flywheel.serving.server.asgi import answer, answer_json, parsed, route_path
from flywheel.serving.server.call_recorder import CallRecorder
from flywheel.system.server_limits import Receive, RefusedError, Scope, Send, read_body

MAX_CALLS: Final = 1000


class CallEndpoint:
    def __init__(self, recorder: CallRecorder | None) -> None:
        self._recorder = recorder
        # A connection of its own: reading a page and writing do not wait for each other.
        self._log = CallLog(recorder.path) if recorder else None

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Answer with the calls after number `after`, at most `limit`. Raises RefusedError."""
        if scope["method"] != "GET":
            raise RefusedError(405, "GET reads the recorded calls")
        if self._recorder is None or self._log is None:
            raise RefusedError(404, "this server records no calls: serving.call_log is false")
        given = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        after, limit = _number(given, "after", 0), _number(given, "limit", MAX_CALLS)
        try:
            page = await asyncio.to_thread(self._page, self._log, after, min(limit, MAX_CALLS), self._recorder)
        except CallLogError as error:
            raise RefusedError(503, str(error)) from error
        await answer_json(send, 200, page)

    @staticmethod
    def _page(log: CallLog, after: int, limit: int, recorder: CallRecorder) -> bytes:
        return log.page_json(after, limit, PAGE_BYTES, recorder.uncounted).encode()


def _number(given: dict[str, list[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RefusedError(400, f"`{name}` must be a whole number, 0 or more")
    return int(text)


MAX_BYTES = 65536


class Management:
    def __init__(
        self, aliases: AliasTable, instance: str, recorder: CallRecorder | None, max_adapters: int | None
    ) -> None:
        self._aliases = aliases
        self._instance = instance
        self._max_adapters = max_adapters
        self._calls = CallEndpoint(recorder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the middleware's own endpoints. Raises RefusedError."""
        path = route_path(scope)
        if path == routes.CALLS:
            return await self._calls(scope, send)
        if path != routes.ALIAS:
            raise RefusedError(404, f"there are only {routes.ALIAS}, {routes.CALLS} and {routes.READY}")
        if scope["method"] == "GET":
            await answer(send, 200, self._shown())
        elif scope["method"] == "PUT":
            body = await read_body(receive)
            if body is not None:
                await self._point(parsed(body, MAX_BYTES), send)
        else:
            raise RefusedError(405, "GET shows the aliases, PUT sets one")

    def _shown(self) -> dict[str, Any]:
        targets = self._aliases.targets
        return {
            "aliases": {alias: target.name for alias, target in targets.items()},
            "paths": {target.name: target.path for target in targets.values() if target.path},
            "digests": {target.name: target.sha256 for target in targets.values() if target.sha256},
            "waiting": dict(self._aliases.waiting),
            "base_model": self._aliases.base_model,
            "instance": self._instance,
            "max_adapters": self._max_adapters,
        }

    async def _point(self, wanted: Any, send: Send) -> None:
        try:
            alias, target = wanted["alias"], wanted["target"]
            others = [wanted.get(key) for key in ("path", "sha256", "expected", "waiting")]
            texts = isinstance(alias, str) and isinstance(target, str)
            if not (texts and all(isinstance(value, str | None) for value in others)):
                raise TypeError
            path, sha256, expected, waiting = others
        except (KeyError, TypeError, AttributeError):
            raise RefusedError(
                400, "expected {alias, target, path?, sha256?, expected?, waiting?}, all texts"
            ) from None
        if not alias or not target or alias in (target, self._aliases.base_model):
            raise RefusedError(400, "an alias must have a name of its own")
        try:
            previous = await self._aliases.point(alias, Target(target, path, sha256), expected, waiting or "")
        except TargetMismatchError as mismatch:
            raise RefusedError(409, f"{alias} is {mismatch.current}") from None
        except OSError as error:
            raise RefusedError(500, f"the alias file cannot be written: {error}") from None
        await answer(send, 200, {"alias": alias, "target": target, "previous": previous})
