"""Conversations in recorded calls: which call continues which, which belong to one reply, and that reply as spans.

A call continues an earlier one if its messages begin with that call's messages and its answer. Two that continue the
same call are a fork: the second begins a conversation of its own, in the split of the first. So does a call with a
context that the client has compressed, which is recognised by ids of tool calls.

Each call is placed once, in the order in which the calls began, and where it is placed is stored in the file of the
calls. A reply is written to the inbox when it is answered, and noted as handed on afterwards: after a crash in
between, the same rows are written again. A call that continues it later adds to it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from hashlib import blake2b
from sqlite3 import Connection
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from flywheel.config import CallsSource, Config, OtlpSource, StudioSource
from flywheel.errors import ReceiverError
from flywheel.records.chat import text_of
from flywheel.records.request_id import mark_of
from flywheel.records.states import SkipReason
from flywheel.records.task import storable
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import ChatMessage, ModelAnswer, ModelCall, is_reminder
from flywheel.serving.calls.call_log import COMPACTING_SECONDS, CallLog, call_log_copy_path
from flywheel.sources.calls.parsing import parse
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, Row, inbox_of
from flywheel.system.clock import steady_ns
from flywheel.system.files import make_private, private

_REASONING: Final = ("thinking", "reasoning", "redacted_thinking")
_BYTES: Final = 16
_OK: Final = 1
_ERROR: Final = 2
LATE_NS: Final = 86_400 * 10**9
"""How long after its time a call may be pulled, from a server that was away, and still continue a conversation."""


class ConversationHash:
    """A hash over the messages of a conversation, for one credential and user. Each message changes it."""

    def __init__(self, credential: str, user: str) -> None:
        self.value = _hash(b"", [credential, user])
        self._before = self.value
        self._answer: list[Any] | None = None
        """Texts and tool calls of the messages of the assistant since `_before`."""

    def add(self, message: ChatMessage) -> bytes:
        """The hash up to this message."""
        if message.get("role") == "assistant":
            texts, calls = self._answer or ([], [])
            said = text.strip() if isinstance(text := _content(message), str) else text
            self._answer = [texts + [said] * bool(said), calls + _tool_calls(message.get("tool_calls"))]
            self.value = _hash(self._before, ["assistant", *self._answer])
        else:
            role = message.get("role")
            name = message.get("name") if role == "user" else None
            self.value = self._before = _hash(self.value, [role, _content(message), name])
            self._answer = None
        return self.value

    def answered(self, answer: ModelAnswer) -> list[bytes]:
        """The hash with an answer behind the last message; the hash itself stays. A client sends a refusal back as a
        text, or under a key of its own beside an empty text."""
        contents = [answer.content, ""] if answer.is_refusal else [answer.content]
        message = {"role": "assistant", "tool_calls": list(answer.tool_calls)}
        return [copy(self).add({**message, "content": content}) for content in contents]


def hashes(call: ModelCall) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    """Hashes of the beginnings of a call that end with an answer, each with its number of messages, and hashes of the
    whole with each answer to it."""
    hashed = ConversationHash(call.credential, call.user)
    beginnings = []
    for number, message in enumerate(call.messages, 1):
        value = hashed.add(message)
        if message.get("role") == "assistant":
            beginnings.append((number, value))
    return beginnings, list(dict.fromkeys(end for answer in call.answers for end in hashed.answered(answer)))


def tool_call_keys(call: ModelCall, messages: Iterable[ChatMessage]) -> list[bytes]:
    """Hashes of the ids of tool calls in some messages, for the credential and user of the call."""
    ids: dict[str, None] = {}
    for message in messages:
        calls = message.get("tool_calls")
        of_calls = [part.get("id") for part in calls if isinstance(part, dict)] if isinstance(calls, list) else []
        ids |= {
            call_id: None
            for call_id in (*of_calls, message.get("tool_call_id"))
            if isinstance(call_id, str) and call_id
        }
    return [_hash(b"id", [call.credential, call.user, call_id]) for call_id in ids]


def _content(message: ChatMessage) -> Any:
    """The content as text; with other things than text in it, a list."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return [content]
    texts: list[str] = []
    others: list[Any] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(text := part.get("text", part.get("refusal")), str):
            texts.append(text)
        elif not (isinstance(part, dict) and part.get("type") in _REASONING):
            others.append(part)
    text = "\n".join(texts)
    return [text, *others] if others else text


def _tool_calls(calls: Any) -> list[Any]:
    functions = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            functions.append([function.get("name"), _arguments(function.get("arguments"))])
    return functions


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _hash(before: bytes, value: Any) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        text = "too deep"
    return blake2b(before + text.encode(), digest_size=_BYTES).digest()


CALLS_AT_ONCE: Final = 100
BYTES_AT_ONCE: Final = 4 * 1024 * 1024
"""Bytes of the calls that are parsed and placed in one transaction, unless one is larger."""
EARLY_NS: Final = 1_000_000_000
"""A call may begin this much before the end of the call that it continues, as that is recorded: clients go on when
they have seen the end of an answer, and servers have clocks of their own."""
HASHES_PER_QUERY: Final = 500

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS listed (only INTEGER PRIMARY KEY CHECK (only = 1), number INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO listed VALUES (1, 0)",
    "CREATE TABLE IF NOT EXISTS unplaced (number INTEGER PRIMARY KEY, request_id TEXT NOT NULL, "
    "size INTEGER NOT NULL, started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS unplaced_started ON unplaced (started_ns, number)",
    "CREATE TABLE IF NOT EXISTS answered (hash BLOB NOT NULL, request_id TEXT NOT NULL, reply TEXT NOT NULL, "
    "ended_ns INTEGER NOT NULL, is_continued INTEGER NOT NULL, placed_ns INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS answered_hash ON answered (hash)",
    "CREATE INDEX IF NOT EXISTS answered_request ON answered (request_id)",
    "CREATE INDEX IF NOT EXISTS answered_placed ON answered (placed_ns)",
    "CREATE TABLE IF NOT EXISTS tool_calls (hash BLOB PRIMARY KEY, root TEXT NOT NULL, ended_ns INTEGER NOT NULL, "
    "placed_ns INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS tool_calls_placed ON tool_calls (placed_ns)",
    "CREATE TABLE IF NOT EXISTS found_replies (reply TEXT PRIMARY KEY, content BLOB NOT NULL, due_ns INTEGER, "
    "placed_ns INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS found_replies_due ON found_replies (due_ns)",
    "CREATE INDEX IF NOT EXISTS found_replies_placed ON found_replies (placed_ns)",
    # Hashes of conversations up to an answer. The credential is in them, which nobody else knows.
    "CREATE TABLE IF NOT EXISTS erased_histories (hash BLOB PRIMARY KEY) WITHOUT ROWID",
    # Whoever erases a call erases what was noted of it: the user's name, and hashes of what was said.
    "CREATE TRIGGER IF NOT EXISTS erased_is_forgotten AFTER INSERT ON erased BEGIN "
    "DELETE FROM unplaced WHERE request_id = new.request_id; "
    "DELETE FROM found_replies WHERE reply = new.request_id "
    "OR reply IN (SELECT reply FROM answered WHERE request_id = new.request_id); "
    "DELETE FROM answered WHERE request_id = new.request_id; "
    "END",
)
"""`found_replies.due_ns` is null for a reply that was handed on as it is. `placed_ns` is the time of the daemon."""


class FoundCall(Struct, frozen=True):
    """A call of a reply; `error` says why it has no answer."""

    request_id: str
    started_ns: int
    ended_ns: int
    model: str = ""
    error: str = ""


class FoundReply(Struct, frozen=True):
    """The calls from a question to its answer, in order. `root` is the conversation whose split it takes, `skip` says
    why it becomes no task. `is_answered`: the last call asks for no tool."""

    calls: tuple[FoundCall, ...]
    conversation: str
    root: str
    user: str = ""
    skip: SkipReason | None = None
    detail: str = ""
    is_answered: bool = False

    @property
    def id(self) -> str:
        return self.calls[0].request_id


class _Outline(Struct, frozen=True):
    """A call with the hashes of its beginnings, each with its number of messages, and those of the whole with each
    answer; the numbers of the messages in which a user asks something (frameworks send reminders as messages of the
    user); and the hashes of the tool calls in its messages."""

    call: ModelCall
    beginnings: list[tuple[int, bytes]]
    ends: list[bytes]
    questions: list[int]
    tool_calls: list[bytes]


class _Earlier(Struct, frozen=True):
    """The call that a call continues: how many of its messages are known from it."""

    request_id: str
    reply: str
    is_continued: bool
    messages: int


class Conversations:
    """The conversations in one file of calls. To be used by one thread at a time.

    A call continues one that ended within `idle_ns` before it. A reply is handed on `wait_ns` after its answer, or
    after `idle_ns` without one.
    """

    def __init__(
        self,
        log: CallLog,
        *,
        idle_ns: int,
        wait_ns: int = 0,
        erase_calls: Callable[[Collection[str]], object] | None = None,
    ) -> None:
        """`erase_calls` erases calls wherever they are, by default in the file: those that send erased ones again."""
        self._log = log
        self._erase_calls = erase_calls or log.erase
        self._idle_ns = idle_ns
        self._wait_ns = wait_ns

    def place(self, before_ns: int) -> int:
        """Place some of the calls that ended before `before_ns`; returns how many, 0 if none is left.

        Every call that ended before then must be in the file, or must never come.
        """
        with self._log.transaction() as connection:
            self._prepare(connection)
            rows = _next_calls(connection, before_ns)
        if not rows:
            return 0
        recorded = self._log.find([row[1] for row in rows])
        calls = [_outline(parse(recorded[request_id])) for _, request_id in rows if request_id in recorded]
        with self._log.transaction() as connection:
            erased = self._log.erased(recorded)  # perhaps since they were read
            resent = {call.call.request_id for call in calls if _goes_on_from_erased(connection, call)}
            for call in calls:
                if call.call.request_id not in erased | resent:
                    self._place(connection, call)
            connection.executemany("DELETE FROM unplaced WHERE number = ?", [(number,) for number, _ in rows])
        if resent:
            self.erase(resent)
            self._erase_calls(resent)
        return len(rows)

    def due(self, now_ns: int) -> list[FoundReply]:
        """Some of the replies to be handed on now, the oldest first; none if none is left."""
        query = "SELECT content FROM found_replies WHERE due_ns <= ? ORDER BY due_ns LIMIT ?"
        with self._log.transaction() as connection:
            self._prepare(connection)
            return [_decode(row[0]) for row in connection.execute(query, (now_ns, CALLS_AT_ONCE))]

    def hand_on(self, replies: Sequence[FoundReply]) -> None:
        """Note that these replies were handed on."""
        with self._log.transaction() as connection:
            ids = [(reply.id,) for reply in replies]
            connection.executemany("UPDATE found_replies SET due_ns = NULL WHERE reply = ?", ids)

    def erase(self, request_ids: Collection[str]) -> set[str]:
        """Have no call placed any more that goes on from one of these, which are about to be erased; the ids of their
        conversations."""
        found: set[str] = set()
        with self._log.transaction() as connection:
            self._prepare(connection)
            for call in self._log.find(request_ids).values():
                ends = [(end,) for end in _outline(parse(call)).ends]
                connection.executemany("INSERT OR IGNORE INTO erased_histories VALUES (?)", ends)
            own = "SELECT reply FROM answered WHERE request_id = ? UNION SELECT ?"
            for request_id in request_ids:
                for (reply_id,) in connection.execute(own, (request_id, request_id)).fetchall():
                    if (reply := _reply(connection, reply_id)) is not None:
                        found.add(reply.conversation)
        return found

    def prune(self, before_ns: int) -> None:
        """Forget calls that were placed before `before_ns`: no later one can continue them any more."""
        with self._log.transaction() as connection:
            self._prepare(connection)
            connection.execute("DELETE FROM answered WHERE placed_ns < ?", (before_ns,))
            connection.execute("DELETE FROM tool_calls WHERE placed_ns < ?", (before_ns,))
            connection.execute("DELETE FROM found_replies WHERE placed_ns < ? AND due_ns IS NULL", (before_ns,))

    def _prepare(self, connection: Connection) -> None:
        """Make the tables, and list calls that are new in the file. Each time, as the file may have been removed."""
        for statement in _TABLES:
            connection.execute(statement)
        (listed,) = connection.execute("SELECT number FROM listed").fetchone()
        listing = connection.execute(
            "INSERT INTO unplaced SELECT number, request_id, size, started_ns, ended_ns FROM calls WHERE number > ?",
            (listed,),
        )
        if listing.rowcount > 0:
            connection.execute("UPDATE listed SET number = (SELECT max(number) FROM unplaced)")

    def _place(self, connection: Connection, outline: _Outline) -> None:
        call, now_ns = outline.call, time.time_ns()
        placed = FoundCall(
            call.request_id, call.started_ns, call.ended_ns, storable(call.model), storable(call.error)
        )
        earlier = self._continued(connection, call, outline.beginnings)
        before = _reply(connection, earlier.reply) if earlier is not None else None
        own, user = _conversation_id(call.request_id), storable(call.user)
        skip, detail = _skip(call)
        root = ""
        if before is not None and before.calls[0].model != placed.model:
            # Another agent, with an alias of its own, goes on: its reply is one of its own, in the same split.
            root, before, earlier = before.root, None, None
        if before is None:
            root = root or _newest_root(connection, outline.tool_calls) or own
            reply = FoundReply((placed,), own, root, user)
        elif skip is None and earlier is not None and earlier.is_continued:
            reply = FoundReply((placed,), own, before.root, user)
        else:
            reply = FoundReply((placed,), before.conversation, before.root, user)
        if skip is not None:
            # It is never continued, and continues nothing: the client may send the same messages again.
            self._store(
                connection, msgspec.structs.replace(reply, skip=skip, detail=storable(detail), is_answered=True)
            )
            return
        if before is not None and earlier is not None and not earlier.is_continued:
            connection.execute("UPDATE answered SET is_continued = 1 WHERE request_id = ?", (earlier.request_id,))
            if all(number <= earlier.messages for number in outline.questions):
                reply = msgspec.structs.replace(before, calls=(*before.calls, placed), skip=None, detail="")
            elif not before.is_answered:
                detail = f"the user went on before an answer; {before.detail}"
                self._store(
                    connection, msgspec.structs.replace(before, detail=detail, is_answered=True), is_closed=True
                )
        asked_for = [tool_call["function"]["name"] for tool_call in call.answers[0].tool_calls]
        if asked_for and FINISH_FUNCTIONS.isdisjoint(asked_for):
            detail = storable(f"no call followed the one that asked for {', '.join(asked_for)}")
            reply = msgspec.structs.replace(reply, skip=SkipReason.UNFINISHED, detail=detail, is_answered=False)
        else:
            reply = msgspec.structs.replace(reply, is_answered=True)
        self._store(connection, reply)
        connection.executemany(
            "INSERT INTO answered VALUES (?, ?, ?, ?, 0, ?)",
            [(end, call.request_id, reply.id, call.ended_ns, now_ns) for end in outline.ends],
        )
        keys = tool_call_keys(call, [{"tool_calls": list(answer.tool_calls)} for answer in call.answers])
        connection.executemany(
            "INSERT OR REPLACE INTO tool_calls VALUES (?, ?, ?, ?)",
            [(key, reply.root, call.ended_ns, now_ns) for key in keys],
        )

    def _continued(
        self, connection: Connection, call: ModelCall, beginnings: Sequence[tuple[int, bytes]]
    ) -> _Earlier | None:
        """The call that this one continues: of those with the most messages, one that nothing continues yet, and of
        these the newest."""
        since, until = call.started_ns - self._idle_ns, call.started_ns + EARLY_NS
        numbers = {value: number for number, value in beginnings}
        best: tuple[tuple[int, bool, bool, int], _Earlier] | None = None
        for row in _in_parts(
            connection, "answered", "hash, request_id, reply, ended_ns, is_continued", list(numbers)
        ):
            value, request_id, reply, ended_ns, is_continued = row
            if since <= ended_ns <= until:
                rank = (numbers[value], ended_ns <= call.started_ns, not is_continued, ended_ns)
                if best is None or rank > best[0]:
                    best = rank, _Earlier(request_id, reply, bool(is_continued), numbers[value])
        return best[1] if best is not None else None

    def _store(self, connection: Connection, reply: FoundReply, *, is_closed: bool = False) -> None:
        ended_ns = max(call.ended_ns for call in reply.calls)
        wait_ns = self._wait_ns if reply.is_answered else self._idle_ns
        due_ns = 0 if is_closed else ended_ns + wait_ns
        connection.execute(
            "INSERT OR REPLACE INTO found_replies VALUES (?, ?, ?, ?)",
            (reply.id, msgspec.json.encode(reply), due_ns, time.time_ns()),
        )


def _goes_on_from_erased(connection: Connection, outline: _Outline) -> bool:
    """Whether a call has the messages and the answer of an erased one before its own."""
    values = [value for _, value in outline.beginnings]
    return next(_in_parts(connection, "erased_histories", "hash", values), None) is not None


def _next_calls(connection: Connection, before_ns: int) -> list[tuple[int, str]]:
    """Numbers and request ids of calls to be placed together, in the order in which they began."""
    chosen: list[tuple[int, str]] = []
    size = 0
    query = "SELECT number, request_id, size FROM unplaced WHERE ended_ns < ? ORDER BY started_ns, number LIMIT ?"
    for number, request_id, own in connection.execute(query, (before_ns, CALLS_AT_ONCE)):
        size += own
        if chosen and size > BYTES_AT_ONCE:
            break
        chosen.append((number, request_id))
    return chosen


def _in_parts(connection: Connection, table: str, columns: str, values: Sequence[bytes]) -> Iterator[Any]:
    for start in range(0, len(values), HASHES_PER_QUERY):
        some = values[start : start + HASHES_PER_QUERY]
        marks = ", ".join("?" * len(some))
        yield from connection.execute(f"SELECT {columns} FROM {table} WHERE hash IN ({marks})", some)  # noqa: S608


def _reply(connection: Connection, reply: str) -> FoundReply | None:
    row = connection.execute("SELECT content FROM found_replies WHERE reply = ?", (reply,)).fetchone()
    return None if row is None else _decode(row[0])


def _decode(content: bytes) -> FoundReply:
    return msgspec.json.decode(content, type=FoundReply)


def _newest_root(connection: Connection, tool_calls: Sequence[bytes]) -> str:
    """The root of the newest call that asked for one of these tool calls; empty if there is none."""
    roots = [(ended_ns, root) for root, ended_ns in _in_parts(connection, "tool_calls", "root, ended_ns", tool_calls)]
    return max(roots)[1] if roots else ""


def _conversation_id(request_id: str) -> str:
    mark = mark_of(request_id)
    return f"calls-{mark.random if mark is not None else request_id}"


def _outline(call: ModelCall) -> _Outline:
    """What the placement needs of a call. One whose messages have no form that can be read is a failed call."""
    try:
        beginnings, ends = hashes(call)
        questions = [
            number
            for number, message in enumerate(call.messages, 1)
            if message.get("role") == "user" and not is_reminder(text_of(message))
        ]
        return _Outline(call, beginnings, ends, questions, tool_call_keys(call, call.messages))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        why = call.error or f"its messages cannot be read: {error}"
        return _Outline(msgspec.structs.replace(call, messages=(), answers=(), error=why), [], [], [], [])


def extending(log: CallLog, request_ids: Iterable[str]) -> list[str]:
    """The request ids of later calls that go on from one of these: they resend all of its messages, unchanged,
    and its answer, for the same credential and user, and name no other conversation.

    Without the answer, two people who begin with the same words would be taken for one. A call that failed has none:
    then its messages must have an earlier answer.
    """
    found: dict[str, None] = {}
    for request_id, later_ids in log.resending(request_ids).items():
        calls = log.find([request_id, *later_ids])
        given = calls.pop(request_id)
        outline = _outline(parse(given))
        for later in calls.values():
            sender = (later.credential, later.user, later.conversation or given.conversation)
            beginnings = {value for _, value in _outline(parse(later)).beginnings}
            goes_on = not beginnings.isdisjoint(outline.ends) if outline.ends else bool(outline.beginnings)
            if goes_on and sender == (given.credential, given.user, given.conversation or later.conversation):
                found[later.request_id] = None
    return list(found)


def _skip(call: ModelCall) -> tuple[SkipReason | None, str]:
    """Why a call is no part of a conversation, with details for people."""
    if call.is_interrupted:
        return SkipReason.INTERRUPTED, "the client disconnected before the end of the answer"
    if call.error or not call.answers:
        return SkipReason.ERROR, call.error or f"HTTP {call.status} without an answer"
    if "previous_response_id" in call.parameters and call.parameters["previous_response_id"] is not None:
        return (
            SkipReason.NO_QUERY,
            "the request names a response of the server in place of the conversation before it",
        )
    if not call.messages:
        return SkipReason.NO_QUERY, "the request has a prompt in place of messages"
    return None, ""


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
    yield _row(reply, whole, agent_id, "", f"invoke_agent {agent}", attributes)


def _of_call(call: FoundCall) -> tuple[str, dict[str, Any]]:
    gen_ai = {
        "operation": {"name": "chat"},
        "request": {"model": call.model},
        "response": {"id": call.request_id},
    }
    return f"chat {call.model}", {"gen_ai": gen_ai}


def _row(reply: FoundReply, call: FoundCall, span_id: str, parent: str, name: str, attributes: dict[str, Any]) -> Row:
    status = {"code": _ERROR if call.error else _OK, "message": call.error}
    values = {
        "id": span_id,
        "traceId": _id("reply", reply.id, 16),
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(call.started_ns),
        "endTimeUnixNano": str(call.ended_ns),
        "attributes": orjson.dumps(attributes).decode(),
        "events": "[]",
        "status": orjson.dumps(status).decode(),
        "resource": "{}",
        "operationName": attributes["gen_ai"]["operation"]["name"],
        "conversationId": reply.conversation,
    }
    return [values.get(column) for column in COLUMNS]


def _id(kind: str, request_id: str, size: int) -> str:
    return blake2b(f"{kind} {request_id}".encode(), digest_size=size).hexdigest()


class ConversationFinder:
    """Finds the replies of one `calls` source. Where traces are read as well, a reply waits for
    `ingest.calls_wait_seconds`, so that its trace comes first."""

    def __init__(
        self,
        config: Config,
        source: CallsSource,
        erase_calls: Callable[[Collection[str]], object] | None = None,
    ) -> None:
        """`erase_calls` is that of `Conversations`."""
        traced = any(isinstance(other, StudioSource | OtlpSource) for other in config.sources)
        idle_ns = int(source.idle_minutes * 60e9)
        self._keep_ns = idle_ns + LATE_NS
        self._wait_ns = int(config.ingest.calls_wait_seconds * 1e9) if traced else 0
        self._aliases = config.aliases
        self._log = CallLog(call_log_copy_path(config.state_dir), busy_seconds=COMPACTING_SECONDS)
        self.inbox = inbox_of(source, config.state_dir)
        self._inbox = Inbox(self.inbox)
        self._conversations = Conversations(
            self._log, idle_ns=idle_ns, wait_ns=self._wait_ns, erase_calls=erase_calls
        )
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
            now_ns = steady_ns() + (self._wait_ns if final else 0)
            while replies := await asyncio.to_thread(self._conversations.due, now_ns):
                await self._inbox.store([row for reply in replies for row in rows_of(reply, self._agent(reply))])
                await asyncio.to_thread(self._conversations.hand_on, replies)
            await asyncio.to_thread(self._conversations.prune, time.time_ns() - self._keep_ns)

    async def erase(self, request_ids: Collection[str]) -> set[str]:
        """See `Conversations.erase`. Raises CallLogError and ReceiverError."""
        async with self._lock, self._turn():
            return await asyncio.to_thread(self._conversations.erase, request_ids)

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
