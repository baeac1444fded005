"""Placing recorded calls in conversations without a daemon, and the replies that are found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct
from sqlalchemy import Connection, create_engine, select

from flywheel.records.states import SkipReason
from flywheel.records.task import Batch
from flywheel.records.trace import Cursor, PlacedCall, ReplySelection
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.calls.conversations import outline
from flywheel.sources.calls.parsing import parse
from flywheel.sources.calls.replies import batch_of, outcome_of
from flywheel.store import placed_calls
from flywheel.store.kernel.database import ERASURE_KEY, note
from flywheel.store.kernel.schema import metadata


class Call(Struct, frozen=True):
    request_id: str
    model: str


class Reply(Struct, frozen=True):
    """A reply that was found, and why it becomes no task, if so."""

    id: str
    trace_id: str
    calls: tuple[Call, ...]
    conversation: str
    root: str
    user: str
    skip: SkipReason | None
    detail: str
    is_answered: bool


class _State:
    """What is kept between two processes that read the same log."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.connection = create_engine("sqlite://").connect()
        metadata.create_all(self.connection)
        note(self.connection, ERASURE_KEY, "00" * 32)


_STATES: WeakKeyDictionary[CallLog, _State] = WeakKeyDictionary()


class Conversations:
    """The conversations in one file of calls, as `CallsConnector` finds them."""

    def __init__(self, log: CallLog, *, idle_ns: int, wait_ns: int = 0) -> None:
        self.log = CallLogCopy(log.path)
        self._state = _STATES.setdefault(log, _State())
        self._times = {"idle_ns": idle_ns, "wait_ns": wait_ns}

    @property
    def connection(self) -> Connection:
        return self._state.connection

    def place(self, before_ns: int) -> int:
        """Place the calls that ended before then; returns how many."""
        behind, numbers = self.log.unread(self._state.cursor, before_ns)
        for begin in range(0, len(numbers), 5):
            calls = self.log.numbered(numbers[begin : begin + 5])
            placed_calls.place(self.connection, [outline(parse(call)) for call in calls], **self._times)
        self._state.cursor = behind
        return len(numbers)

    def found(self, now_ns: int) -> list[list[PlacedCall]]:
        return placed_calls.due(self.connection, now_ns, 100)

    def due(self, now_ns: int) -> list[Reply]:
        found = self.found(now_ns)
        calls = self.log.calls_of([call.request_id for each in found for call in each])
        gone = self.log.erased({call.request_id for each in found for call in each} - calls.keys())
        replies = []
        for each in found:
            first, ids = each[0], [call.request_id for call in each]
            if set(ids) <= calls.keys():
                own = [outline(calls[request_id]) for request_id in ids]
                entry = batch_of([each], calls, ["agent"], ReplySelection(), "calls.db")
                user = next((row.user for row in (*entry.entries, *entry.dead)), "")
                calls_of = tuple(Call(call.request_id, call.model) for call in own)
                skip, detail = outcome_of(each, calls)
                detail = next((row.detail for row in entry.entries if skip), detail)
                replies.append(
                    Reply(
                        ids[0],
                        first.trace_id,
                        calls_of,
                        first.conversation,
                        first.root,
                        user,
                        skip,
                        detail,
                        each[-1].is_answered,
                    )
                )
            else:
                assert not gone.isdisjoint(ids) or first.is_erased
                placed_calls.hand_on(self.connection, [first.trace_id])
        return replies

    def hand_on(self, replies: Sequence[Reply]) -> None:
        placed_calls.hand_on(self.connection, [reply.trace_id for reply in replies])

    def batch(self, found: Sequence[Sequence[PlacedCall]]) -> Batch:
        calls = self.log.calls_of([call.request_id for each in found for call in each])
        return batch_of(found, calls, ["agent"], ReplySelection(), "calls.db")

    def prune(self, before_ns: int) -> None:
        placed_calls.prune(self.connection, before_ns)

    def erase(self, request_ids: Collection[str]) -> set[str]:
        """Erase calls, as an erasure does; the conversations that they were in."""
        calls = self.log.find(request_ids)
        outlines = [outline(parse(call)) for call in calls.values()]
        conversations = placed_calls.refuse(self.connection, outlines, request_ids)
        self.log.erase(request_ids)
        placed_calls.forget(self.connection, request_ids)
        return conversations

    def rows(self, query: Any) -> list[Any]:
        return [tuple(row) for row in self.connection.execute(query)]

    def placed(self) -> list[str]:
        """The calls that are stored, in their order."""
        query = select(placed_calls.placed_calls.c.request_id).order_by(placed_calls.placed_calls.c.number)
        return list(self.connection.execute(query).scalars())
