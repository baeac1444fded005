"""Erases lines from a file that is Flywheel's own copy of a data set."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from flywheel.errors import StoreError
from flywheel.records.task import conversation_key
from flywheel.sources.jsonl.reader import JsonlFile, Line, dead_trace, named_by
from flywheel.sources.jsonl.record import LineError, entry_of_line
from flywheel.system.files import remove_temporary, whole_file

_BLOCK: Final = 1 << 20


def erase_lines(path: Path, traces: Collection[str], conversations: Collection[str]) -> int:
    """Empty the lines of these traces and conversations; returns how many that were. The others keep their numbers,
    by which lines are known that cannot be read. The file appears whole, and what writing it left before is removed.
    Raises SourceError and StoreError."""
    file = JsonlFile(path)
    try:
        going = [(line.start, line.end) for line in _lines(file) if _belongs(line, traces, conversations)]
    finally:
        file.close()
    try:
        remove_temporary(path.parent, lambda name: name == path.name)
        if going:
            with path.open("rb") as before, whole_file(path) as after:
                for start, end in going:
                    _copy(before, after, start)
                    after.write(b"\n")
                    before.seek(end)
                shutil.copyfileobj(before, after)
    except OSError as error:
        hint = "Make it and its folder writable, and run the command again."
        raise StoreError(f"erase lines from {path}", error.strerror or str(error), hint) from error
    return len(going)


def _lines(file: JsonlFile) -> Iterator[Line]:
    yield from file.lines(0)
    if file.unfinished is not None:
        yield file.unfinished


def _belongs(line: Line, traces: Collection[str], conversations: Collection[str]) -> bool:
    if line.whole and not line.text.strip():
        return False
    try:
        if not line.whole:
            raise LineError
        entry = entry_of_line(line.text, Path(), datetime.now(UTC))
        trace, conversation = entry.trace_id, entry.conversation_id
    except Exception:
        # Whatever keeps it from being a task: it is known by its hash and by whom it names.
        trace, conversation = dead_trace(line), named_by(line)[0]
    return trace in traces or conversation_key(conversation, trace) in conversations


def _copy(before: BinaryIO, after: BinaryIO, end: int) -> None:
    """Copy the bytes up to place `end`."""
    while (left := end - before.tell()) > 0 and (block := before.read(min(left, _BLOCK))):
        after.write(block)
