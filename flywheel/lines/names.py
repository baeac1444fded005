"""Which name a line goes by: its own id, unless that is another line's already; then a hash of what it says.

An id belongs to the first task that has it, in whichever file that stands. What a line says is its question, its
answer and the history before: a line that says the same is the same task, whatever else is written beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import orjson
from msgspec.structs import replace

from flywheel.batch import Entry, line_bytes
from flywheel.lines.record import LineEntry


class Known(Protocol):
    """What is stored under an id: `contents` are the hashes of the lines that told it, None where that is unknown."""

    @property
    def has_task(self) -> bool: ...
    @property
    def contents(self) -> frozenset[int | None]: ...


class Names:
    """Names of the lines that come one after the other; what they were given goes before what is stored."""

    def __init__(self) -> None:
        self._met: dict[str, tuple[str, bool]] = {}
        """Of each id that was given: what its line goes by otherwise, and whether it is a task."""

    def given(
        self, entries: Iterable[Entry], known: Mapping[str, Known], line_of: Callable[[str], bytes]
    ) -> tuple[Entry, ...]:
        """The entries by their names; `line_of` gives the stored task of an id."""
        return tuple(
            self._named(entry, known.get(entry.key), line_of) if isinstance(entry, LineEntry) else entry
            for entry in entries
        )

    def _named(self, entry: LineEntry, known: Known | None, line_of: Callable[[str], bytes]) -> LineEntry:
        if entry.otherwise == entry.key:
            return entry
        if not self._is_its_own(entry, known, line_of):
            name = entry.otherwise
            return replace(entry, key=name, span_id=name, line=_renamed(entry.line, name))
        self._met[entry.key] = entry.otherwise, bool(entry.line)
        return entry

    def _is_its_own(self, entry: LineEntry, known: Known | None, line_of: Callable[[str], bytes]) -> bool:
        """Whether the id of a line is free or stands for the same."""
        if entry.key in self._met:
            otherwise, is_task = self._met[entry.key]
            return entry.otherwise == otherwise or (bool(entry.line) and not is_task)
        if known is None or entry.content in known.contents:
            return True
        if not known.has_task:
            # What had no answer may have got one.
            return bool(entry.line) or None in known.contents
        return bool(entry.line) and _says(entry.line) == _says(line_of(entry.key))


def _says(line: bytes) -> bytes:
    task: dict[str, Any] = orjson.loads(line)
    said = (task["question"], task["answer"], task["init_messages"], task["metadata"].get("images_json"))
    return orjson.dumps(said, option=orjson.OPT_SORT_KEYS)


def _renamed(line: bytes, name: str) -> bytes:
    if not line:
        return line
    task: dict[str, Any] = orjson.loads(line)
    task["task_id"] = task["metadata"]["span_id"] = name
    return line_bytes(task)
