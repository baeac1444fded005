"""Results of other tasks' traces for rollouts: those on which two conversations agree and none differs."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Collection
from typing import Final

from flywheel.records.states import Split
from flywheel.records.tool_results import Result, SharedRecordings
from flywheel.training.recorded.recordings import Recording, TraceResults

MAX_BYTES: Final = 8 << 20
"""Text of results that a specification has room for. First those that were called most often."""

_ADD: Final = (
    "INSERT INTO results VALUES (?, ?, ?, ?, 1, 0, 0) ON CONFLICT (key) DO UPDATE SET calls = calls + 1,"
    " confirmed = confirmed OR conversation <> excluded.conversation,"
    " differs = differs OR content <> excluded.content OR failed <> excluded.failed"
)
_AGREEING: Final = "SELECT key, content, failed FROM results WHERE confirmed AND NOT differs ORDER BY calls DESC, key"


class RecordingPool:
    """What rollouts of tasks in the split `reader` may use; training never reads held-out traces.

    The results are in a temporary database on disk, however many traces are added.
    """

    def __init__(self, reader: Split, offered: Collection[str]) -> None:
        """`offered` are the digests of the tools that rollouts are offered."""
        self._reader, self._offered = reader, frozenset(offered)
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE results (key TEXT PRIMARY KEY, content BLOB, failed INTEGER, conversation BLOB,"
            " calls INTEGER, confirmed INTEGER, differs INTEGER) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, recording: Recording, results: TraceResults) -> None:
        """Add a trace, with the results that `results_of` finds in it."""
        if self._reader is Split.TRAIN and recording.split is not Split.TRAIN:
            return
        own = [each for each in results.results if each.tool.digest in self._offered]
        if own:
            key = recording.conversation or recording.task_id
            conversation = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]
            rows = ((each.key, _bytes(each.result.content), each.result.failed, conversation) for each in own)
            self._database.executemany(_ADD, rows)

    def shared(self) -> SharedRecordings:
        """What rollouts may use of the traces so far."""
        shared: dict[str, Result] = {}
        room = MAX_BYTES
        for key, content, failed in self._database.execute(_AGREEING):
            # A result that has no room leaves room for smaller ones.
            if len(content) <= room:
                room -= len(content)
                shared[key] = Result(content.decode("utf-8", "surrogatepass"), bool(failed))
        return SharedRecordings(shared)

    def close(self) -> None:
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
