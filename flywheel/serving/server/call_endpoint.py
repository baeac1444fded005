"""GET /flywheel/calls: pages of the call log, for the daemon. Requests have been authenticated with the admin key."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

from flywheel.errors import CallLogError
from flywheel.serving.calls.call_log import PAGE_BYTES, CallLog
from flywheel.serving.server.asgi import answer_json
from flywheel.serving.server.call_recorder import CallRecorder
from flywheel.system.server_limits import RefusedError, Scope, Send

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
