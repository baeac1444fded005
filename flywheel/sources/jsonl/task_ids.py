"""Which name a line goes by: its own id, unless that is another line's already; then a hash of what it says.

An id belongs to the first task that has it, in whichever file that stands. What a line says is its question, its
answer and the history before: a line that says the same is the same task, whatever else is written beside it. A line
that is no task adds nothing to an id that has one: it may have stood there before the answer came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import orjson
import xxhash
from msgspec.structs import replace

from flywheel.batch import Entry, line_bytes
from flywheel.sources.jsonl.record import JsonlEntry

Redact = Callable[[dict[str, Any]], dict[str, Any]]


class Known(Protocol):
    """What is stored under an id: `contents` are the hashes of the lines that told it, None where that is unknown."""

    @property
    def has_task(self) -> bool: ...
    @property
    def contents(self) -> frozenset[int | None]: ...


class _Holder:
    """What goes by an id: the hashes of its lines, whether it is a task, and what that says."""

    __slots__ = ("_line", "_says", "contents", "is_task")

    def __init__(self, known: Known | None) -> None:
        self.contents: set[int | None] = set(known.contents) if known else set()
        self.is_task = known is not None and known.has_task
        self._line: bytes | None = None
        self._says: bytes | None = None

    def take(self, entry: JsonlEntry) -> None:
        self.contents.add(entry.content)
        if entry.line and not self.is_task:
            self.is_task = True
            self._line = entry.line

    def forget_line(self, redact: Redact) -> None:
        """Keep the hash of its line alone."""
        if self._line is not None:
            self._says, self._line = self._says or _says(self._line, redact), None

    def says(self, redact: Redact, stored: Callable[[], bytes]) -> bytes:
        """A hash of it, made once; `stored` gives the line of a task that was known before."""
        if self._says is None:
            self._says = _says(stored()) if self._line is None else _says(self._line, redact)
        return self._says


class TaskIds:
    """Names of the lines that come one after the other; what they were given goes before what is stored.

    Lines are compared as they are stored: `redact` is what they still have to go through for that.
    """

    def __init__(self, redact: Redact | None = None) -> None:
        self._redact: Redact = redact or (lambda task: task)
        self._holders: dict[str, _Holder] = {}
        self._recent: list[_Holder] = []
        """Those whose lines may still be held: no more of them than came last."""

    def given(
        self, entries: Iterable[Entry], known: Mapping[str, Known], line_of: Callable[[str], bytes]
    ) -> list[Entry | None]:
        """The entries by their names, None for one that adds nothing; `line_of` gives the stored task of an id.

        `known` is asked for the entries' ids, and for what those that are no tasks go by otherwise.
        """
        for holder in self._recent:
            holder.forget_line(self._redact)
        self._recent.clear()
        return [self._named(entry, known, line_of) if isinstance(entry, JsonlEntry) else entry for entry in entries]

    def _named(
        self, entry: JsonlEntry, known: Mapping[str, Known], line_of: Callable[[str], bytes]
    ) -> JsonlEntry | None:
        if entry.otherwise == entry.key:
            return entry
        holder = self._holders.get(entry.key)
        if holder is None:
            holder = self._holders[entry.key] = _Holder(known.get(entry.key))
        if self._is_its_own(entry, holder, line_of):
            holder.take(entry)
            self._recent.append(holder)
            return entry
        name = entry.otherwise
        if not entry.line and holder.is_task and name not in known:
            return None
        return replace(entry, key=name, span_id=name, line=_renamed(entry.line, name))

    def _is_its_own(self, entry: JsonlEntry, holder: _Holder, line_of: Callable[[str], bytes]) -> bool:
        """Whether the id of a line is free or stands for the same."""
        if not holder.contents or entry.content in holder.contents:
            return True
        if not holder.is_task:
            # What had no answer may have got one.
            return bool(entry.line) or None in holder.contents
        if not entry.line:
            return False
        return _says(entry.line, self._redact) == holder.says(self._redact, lambda: line_of(entry.key))


def _says(line: bytes, redact: Redact | None = None) -> bytes:
    task: dict[str, Any] = orjson.loads(line)
    if redact is not None:
        task = redact(task)
    said = (task["question"], task["answer"], task["init_messages"], task["metadata"].get("images_json"))
    return xxhash.xxh3_128_digest(orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def _renamed(line: bytes, name: str) -> bytes:
    if not line:
        return line
    task: dict[str, Any] = orjson.loads(line)
    task["task_id"] = task["metadata"]["span_id"] = name
    return line_bytes(task)
