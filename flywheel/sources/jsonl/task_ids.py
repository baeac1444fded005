"""Which id the task of a line gets: the line's own `task_id`, or a hash of its content if another task has that id.

An id belongs to the first task that has it, in any file. Two lines are the same task if question, answer and history
are equal. A line without a task (no answer yet, for example) adds nothing to an id that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
import xxhash
from msgspec.structs import replace

from flywheel.records.batch import Entry, KnownReply, line_bytes
from flywheel.sources.jsonl.record import JsonlEntry

Redact = Callable[[dict[str, Any]], dict[str, Any]]


class _Owner:
    """What an id stands for: the content hashes of its lines, whether it is a task, and that task's identity."""

    __slots__ = ("contents", "has_task", "identity", "line")

    def __init__(self, known: KnownReply | None) -> None:
        self.contents: set[int | None] = set(known.contents) if known else set()
        self.has_task = known is not None and known.has_task
        self.line = b""
        """The task's line, held until `identity` is computed; empty for a task of the ledger."""
        self.identity = b""


class TaskIds:
    """Assigns ids to entries that are read one after the other. Its own assignments go before those of the ledger.

    Lines are compared as they are stored, so `redact` is applied first.
    """

    def __init__(self, redact: Redact | None = None) -> None:
        self._redact: Redact = redact or (lambda task: task)
        self._owners: dict[str, _Owner] = {}
        self._with_line: list[_Owner] = []

    def assign(
        self, entries: Iterable[Entry], known: Mapping[str, KnownReply], line_of: Callable[[str], bytes]
    ) -> list[Entry | None]:
        """The entries with their final ids, None for one that adds nothing.

        `known` holds what the ledger has for the entries' keys, and for the `otherwise` of those without a task.
        `line_of` returns the stored line of an id.
        """
        for owner in self._with_line:
            # Only the lines of the last call are held; a hash of the others is enough.
            owner.identity, owner.line = owner.identity or self._identity(owner.line), b""
        self._with_line.clear()
        return [
            self._assigned(entry, known, line_of) if isinstance(entry, JsonlEntry) else entry for entry in entries
        ]

    def _assigned(
        self, entry: JsonlEntry, known: Mapping[str, KnownReply], line_of: Callable[[str], bytes]
    ) -> JsonlEntry | None:
        if entry.otherwise == entry.key:
            return entry
        owner = self._owners.get(entry.key)
        if owner is None:
            owner = self._owners[entry.key] = _Owner(known.get(entry.key))
        if self._owns(owner, entry, line_of):
            owner.contents.add(entry.content)
            if entry.line and not owner.has_task:
                owner.has_task, owner.line = True, entry.line
                self._with_line.append(owner)
            return entry
        if not entry.line and owner.has_task and entry.otherwise not in known:
            return None
        line = entry.line
        if line:
            task: dict[str, Any] = orjson.loads(line)
            task["task_id"] = task["metadata"]["span_id"] = entry.otherwise
            line = line_bytes(task)
        return replace(entry, key=entry.otherwise, span_id=entry.otherwise, line=line)

    def _owns(self, owner: _Owner, entry: JsonlEntry, line_of: Callable[[str], bytes]) -> bool:
        """Whether the entry's own id is free, or stands for the same task."""
        if not owner.contents or entry.content in owner.contents:
            return True
        if not owner.has_task:
            # A line without an answer may have been completed.
            return bool(entry.line) or None in owner.contents
        if not entry.line:
            return False
        if not owner.identity:
            owner.identity = self._identity(owner.line) if owner.line else _hash(orjson.loads(line_of(entry.key)))
        return self._identity(entry.line) == owner.identity

    def _identity(self, line: bytes) -> bytes:
        return _hash(self._redact(orjson.loads(line)))


def _hash(task: Mapping[str, Any]) -> bytes:
    """A hash of question, answer, history and images."""
    content = (task["question"], task["answer"], task["init_messages"], task["metadata"].get("images_json"))
    return xxhash.xxh3_128_digest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
