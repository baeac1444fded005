"""Connects the copy of all call logs with the ledger: calls are placed in conversations, and their replies stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.ingest import CallsSource, OtlpSource, StudioSource
from flywheel.records.task import Batch
from flywheel.records.trace import CallOutline, Cursor, PlacedCall, ReplySelection
from flywheel.serving.calls.call_log import COMPACTING_SECONDS
from flywheel.sources.call_puller import CallLogCopy, CallPuller
from flywheel.sources.calls.conversations import outline
from flywheel.sources.calls.parsing import parse
from flywheel.sources.calls.replies import batch_of
from flywheel.sources.studio_connector import Progress
from flywheel.store import placed_calls
from flywheel.store.kernel.database import Store
from flywheel.store.ledger import CALLS, Recorded, record_batch
from flywheel.system.clock import steady_ns

CALLS_AT_ONCE: Final = 100
"""Calls that are placed, and replies that are looked up, in one transaction."""
BYTES_AT_ONCE: Final = 4 * 1024 * 1024
"""Bytes of the calls of the replies that are stored in one transaction, unless one has more."""
LATE_NS: Final = 86_400 * 10**9
"""How long after its time a call may be pulled, from a server that was away, and still continue a conversation."""


def record(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch, and note in the same transaction that its replies were handed on: one that another source has
    made due again meanwhile has to be handed on once more."""
    done = record_batch(conn, source, batch, train_ratio=train_ratio, split_seed=split_seed)
    placed_calls.hand_on(conn, _traces(batch))
    return done


def _traces(batch: Batch) -> set[str]:
    return {entry.trace_id for entry in batch.entries} | {row.trace_id for row in batch.dead}


class CallsConnector:
    """The replies of one `calls` source. Where traces are read as well, a reply waits for
    `ingest.calls_wait_seconds`, so that its trace comes first."""

    type = CALLS
    schema = "calls"
    longest_read_ms = 0.0

    def __init__(
        self,
        path: Path,
        config: Config,
        source: CallsSource,
        store: Store,
        calls: CallPuller,
        is_ready: Callable[[], bool],
    ) -> None:
        """`is_ready`: a long history of traces, which comes first, has been read."""
        self.path = path
        self.due_at: float | None = None
        """When the next reply is due, by the steady clock; None if none waits."""
        self.progress = Progress()
        self._store = store
        self._calls = calls
        self._is_ready = is_ready
        self._log = CallLogCopy(path, busy_seconds=COMPACTING_SECONDS)
        traced = any(isinstance(other, StudioSource | OtlpSource) for other in config.sources)
        self._idle_ns = int(source.idle_minutes * 60e9)
        self._keep_ns = max(self._idle_ns + LATE_NS, int(config.ingest.keep_received_days * 86_400e9))
        self._wait_ns = int(config.ingest.calls_wait_seconds * 1e9) if traced else 0
        self._aliases = config.aliases
        agents = config.ingest.agents
        self._selection = ReplySelection(
            frozenset(agents.include),
            frozenset(agents.exclude),
            config.models_of(source),
            config.privacy.exclude.names,
        )

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass; each batch must be stored before the next is asked for. A `final` one does not wait for traces,
        nor for calls that a server may not have recorded yet. Raises CallLogError and StoreError."""
        if not self._is_ready():
            return
        until_ns = self._calls.read_to_ns - (0 if final else placed_calls.EARLY_NS)
        behind, numbers = await asyncio.to_thread(self._log.unread, cursor, until_ns)
        self.progress = progress = Progress(in_all=len(numbers))
        while progress.read < len(numbers):
            next_ones = numbers[progress.read : progress.read + CALLS_AT_ONCE]
            outlines = await asyncio.to_thread(self._outlines, next_ones)
            await self._store.write(placed_calls.place, outlines, idle_ns=self._idle_ns, wait_ns=self._wait_ns)
            progress.read += len(next_ones)
        yield Batch(behind)
        now_ns = steady_ns() + (self._wait_ns if final else 0)
        while found := await self._store.read(placed_calls.due, now_ns, CALLS_AT_ONCE):
            for some in await asyncio.to_thread(self._in_parts, found):
                batch = await asyncio.to_thread(self._batch, some)
                erased = [call.request_id for reply in some for call in reply if call.is_erased]
                if ids := [*batch.private_calls, *erased]:
                    # First, as after a crash the replies are due again.
                    await self._calls.erase_new(ids)
                yield batch
                if left_out := {reply[0].trace_id for reply in some} - _traces(batch):
                    await self._store.write(placed_calls.hand_on, left_out)
        await self._store.write(placed_calls.prune, time.time_ns() - self._keep_ns)
        next_ns = await self._store.read(placed_calls.next_due_ns)
        self.due_at = None if next_ns is None else next_ns / 1e9

    async def rescan(self, number: int, *, whole: bool) -> AsyncGenerator[Batch]:
        """The replies that were handed on and whose calls are all in the copy, extracted again. Raises CallLogError
        and StoreError."""
        after = 0
        while True:
            after, found = await self._store.read(placed_calls.handed_on, after, CALLS_AT_ONCE)
            if not after:
                return
            for some in await asyncio.to_thread(self._in_parts, found):
                yield await asyncio.to_thread(self._batch, some, only_whole=True)

    async def refuse(self, request_ids: Collection[str]) -> set[str]:
        """Have nothing stored that goes on from one of these calls, which are about to be erased; the ids of their
        conversations. Raises CallLogError and StoreError."""

        # One call at a time: all those of a user may not fit into memory.
        calls = (call for each in request_ids for call in self._log.find([each]).values())
        outlines = await asyncio.to_thread(lambda: [outline(parse(call)) for call in calls])
        return await self._store.write(placed_calls.refuse, outlines, request_ids)

    def forget(self) -> None:
        """Nothing that is not stored is kept between two passes."""

    async def close(self) -> None:
        await asyncio.to_thread(self._log.close)

    def _outlines(self, numbers: Sequence[int]) -> list[CallOutline]:
        return [outline(parse(call)) for call in self._log.numbered(numbers)]

    def _in_parts(self, found: Sequence[Sequence[PlacedCall]]) -> list[list[Sequence[PlacedCall]]]:
        """The replies in portions whose calls have about BYTES_AT_ONCE, unless one has more."""
        sizes = self._log.sizes(call.request_id for reply in found for call in reply)
        total = accumulate(sum(sizes.get(call.request_id, 0) for call in reply) for reply in found)
        return [list(part) for _, part in groupby(found, lambda _: next(total) // BYTES_AT_ONCE)]

    def _batch(self, found: Sequence[Sequence[PlacedCall]], *, only_whole: bool = False) -> Batch:
        """The entries of replies. Of one with an erased call, or (`only_whole`) without a call, there is none; one
        that goes on from an erased call is counted without its texts."""
        ids = {call.request_id for reply in found for call in reply if not call.is_erased}
        calls = self._log.calls_of(ids)
        lacking = ids - calls.keys()
        gone = lacking if only_whole else self._log.erased(lacking)
        left = [reply for reply in found if gone.isdisjoint(call.request_id for call in reply)]
        return batch_of(left, calls, self._aliases, self._selection, str(self.path))
