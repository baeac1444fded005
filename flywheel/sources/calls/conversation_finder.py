"""Connects the copied calls with the inbox of a `calls` source: their conversations as spans.

Where each call is placed is stored with the calls, and what was written to the inbox is noted afterwards. After a
crash in between the same rows are written again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Final

import orjson

from flywheel.config import CallsSource, Config, OtlpSource, StudioSource
from flywheel.errors import ReceiverError
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.calls.call_log_copy import call_log_copy_path
from flywheel.sources.calls.conversations import EARLY_NS, Conversations, FoundCall, FoundReply
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, Row, inbox_of
from flywheel.system.files import make_private, private

_OK = 1
_ERROR = 2
_INTERNAL = 1
_CLIENT = 3


def rows_of(reply: FoundReply, agent: str) -> Iterator[Row]:
    """The rows for the inbox: those of the calls first, so that the agent's span completes them."""
    agent_id = _id("agent", reply.id, 8)
    for call in reply.calls:
        yield _row(reply, call, _id("call", call.request_id, 8), agent_id, *_of_call(call))
    whole = FoundCall(
        reply.id, min(call.started_ns for call in reply.calls), max(call.ended_ns for call in reply.calls)
    )
    attributes: dict[str, Any] = {
        "gen_ai": {
            "operation": {"name": "invoke_agent"},
            "agent": {"name": agent},
            "conversation": {"id": reply.conversation},
        },
        "flywheel": {"root_conversation": reply.root, "skip": reply.skip or "", "detail": reply.detail},
    }
    if reply.user:
        attributes["user"] = {"id": reply.user}
    yield _row(reply, whole, agent_id, "", f"invoke_agent {agent}", _INTERNAL, attributes)


def _of_call(call: FoundCall) -> tuple[str, int, dict[str, Any]]:
    gen_ai = {
        "operation": {"name": "chat"},
        "request": {"model": call.model},
        "response": {"id": call.request_id},
    }
    return f"chat {call.model}", _CLIENT, {"gen_ai": gen_ai}


def _row(
    reply: FoundReply, call: FoundCall, span_id: str, parent: str, name: str, kind: int, attributes: dict[str, Any]
) -> Row:
    status = {"code": _ERROR if call.error else _OK, "message": call.error}
    values = {
        "id": span_id,
        "traceId": _id("reply", reply.id, 16),
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(call.started_ns),
        "endTimeUnixNano": str(call.ended_ns),
        "attributes": _json(attributes),
        "events": "[]",
        "links": "[]",
        "status": _json(status),
        "resource": "{}",
        "scope": "{}",
        "statusCode": status["code"],
        "operationName": attributes["gen_ai"]["operation"]["name"],
        "model": attributes["gen_ai"].get("request", {}).get("model"),
        "conversationId": reply.conversation,
        "latencyNs": float(call.ended_ns - call.started_ns),
    }
    return [values.get(column) for column in COLUMNS]


def _id(kind: str, request_id: str, size: int) -> str:
    return blake2b(f"{kind} {request_id}".encode(), digest_size=size).hexdigest()


def _json(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()


LATE_NS: Final = 86_400 * 10**9
"""How long after its time a call may be pulled, from a server that was away, and still continue a conversation."""


class ConversationFinder:
    """Finds the replies of one `calls` source. Where traces are read as well, a reply waits for
    `ingest.calls_wait_seconds`, so that its trace comes first."""

    def __init__(self, config: Config, source: CallsSource) -> None:
        traced = any(isinstance(other, StudioSource | OtlpSource) for other in config.sources)
        idle_ns = int(source.idle_minutes * 60e9)
        self._keep_ns = idle_ns + LATE_NS
        self._wait_ns = int(config.ingest.calls_wait_seconds * 1e9) if traced else 0
        self._aliases = config.aliases
        self._log = CallLog(call_log_copy_path(config.state_dir))
        self.inbox = inbox_of(source, config.state_dir)
        self._inbox = Inbox(self.inbox)
        self._conversations = Conversations(self._log, idle_ns=idle_ns, wait_ns=self._wait_ns)
        self._lock = asyncio.Lock()

    async def update(self, pulled_to_ns: int, *, final: bool = False, stop: asyncio.Event | None = None) -> None:
        """Place the calls that ended before `pulled_to_ns` and write their replies, until `stop`.

        All calls that ended before then must have been pulled. A `final` update does not wait for traces, nor for
        calls that a server may not have recorded yet. A dry run beside a daemon takes turns with it. Raises
        CallLogError and ReceiverError.
        """
        until_ns = pulled_to_ns - (0 if final else EARLY_NS)
        async with self._lock, self._turn():
            while not (stop is not None and stop.is_set()):
                if not await asyncio.to_thread(self._conversations.place, until_ns):
                    break
            now_ns = time.time_ns() + (self._wait_ns if final else 0)
            while replies := await asyncio.to_thread(self._conversations.due, now_ns):
                await self._inbox.store([row for reply in replies for row in rows_of(reply, self._agent(reply))])
                await asyncio.to_thread(self._conversations.hand_on, replies)
            await asyncio.to_thread(self._conversations.prune, time.time_ns() - self._keep_ns)

    def _agent(self, reply: FoundReply) -> str:
        """The agent that gave a reply: the alias that it called."""
        called = reply.calls[0].model
        return called if called in self._aliases else self._aliases[0]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The time in which no other process places calls or writes replies. Raises ReceiverError."""
        path = self.inbox.with_suffix(".lock")
        try:
            make_private(path.parent)
            file = private(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            hint = "Check the disk's free space and the permissions of the folder."
            raise ReceiverError(f"open {path}", str(error), hint, retryable=True) from error
        try:
            await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    async def close(self) -> None:
        await self._inbox.close()
        await asyncio.to_thread(self._log.close)
