"""Task files that AgentJet wrote: their replies were judged there and are not judged again."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import orjson
from msgspec.structs import replace

from flywheel.batch import Batch, Entry
from flywheel.errors import StoreError
from flywheel.states import SkipReason
from flywheel.store.task_file_repair import Format, format_of, metadata_of, numbered


class AgentJetTasks:
    """The tasks of AgentJet at the place of the task file, read once, when the first replies come. Thread-safe."""

    def __init__(self, task_file: Path) -> None:
        self._path = task_file
        self._reading = threading.Lock()
        self._hashes: set[int] | None = None

    def skipped(self, batch: Batch) -> Batch:
        """The batch, in which replies that AgentJet has judged are skipped. Their content hashes stay."""
        with self._reading:
            if self._hashes is None:
                self._hashes = self._read()
        if not self._hashes:
            return batch
        return replace(batch, entries=tuple(self._entry(entry, self._hashes) for entry in batch.entries))

    def _entry(self, entry: Entry, hashes: set[int]) -> Entry:
        if not entry.line or _short(orjson.loads(entry.line)["metadata"]["qa_hash"]) not in hashes:
            return entry
        return replace(
            entry,
            line=b"",
            beginning=0,
            words=(),
            bands=(),
            excluded="",
            skip=SkipReason.IN_TASK_FILE,
            detail=f"its question and answer stand in the file that AgentJet wrote at {self._path}",
        )

    def _read(self) -> set[int]:
        """The hashes in the file of AgentJet at this place, and in those that were set aside from there.

        Raises StoreError (retryable) when one cannot be read.
        """
        found: set[int | None] = set()
        try:
            # The numbered files are listed after the first one was read: it may be set aside meanwhile.
            for path in itertools.chain([self._path], numbered(self._path)):
                if format_of(path) is not Format.AGENTJET:
                    continue
                with path.open("rb") as file:
                    found.update(_short(metadata_of(line).get("qa_hash")) for line in file)
        except OSError as error:
            raise StoreError(
                f"read {error.filename or self._path}, which AgentJet wrote",
                error.strerror or str(error),
                "Check its permissions: what is in it is not judged again.",
                retryable=True,
            ) from error
        return {each for each in found if each is not None}


def _short(qa_hash: object) -> int | None:
    """64 bits of the SHA-256 of question, newline and answer: a file can have a million. None if it is no hash."""
    try:
        return int(qa_hash[:16], 16) if isinstance(qa_hash, str) else None
    except ValueError:
        return None
