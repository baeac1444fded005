"""The task file compared with the state: every exported task once, every line whole.

What was set aside when the format of lines changed belongs to it. Another program may move the file away; the next
export begins a new one. So tasks that are older than all in the file
went with an earlier one, and only those between its first and its last are lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Final

import orjson

from flywheel.diagnostics.audit_findings import TaskFileAudit
from flywheel.store import ledger_snapshot
from flywheel.store.database import Store
from flywheel.store.existing_task_file import earlier_files

_LOOKS: Final = 10
_PAUSE_SECONDS: Final = 0.1
"""A line that is just being appended is whole soon."""


async def compare_task_file(store: Store, path: Path) -> TaskFileAudit:
    """The task file with the state, beside whoever appends to it."""
    # The state first: what is marked as exported is in the file.
    exported = await store.read(ledger_snapshot.exported)
    waiting = await store.read(ledger_snapshot.count_unexported)
    found = TaskFileAudit(path, exported=len(exported), waiting=waiting)
    try:
        files = await _read(found)
    except OSError as error:
        found.error = f"cannot read the task file {error.filename or path}: {error.strerror or error}."
        return found
    keys = sum(files, Counter[str]())
    found.twice = [key for key, times in keys.items() if times > 1]
    found.unknown = len(await store.read(ledger_snapshot.unknown_keys, [key for key in keys if key not in exported]))
    *aside, last = [[exported[key] for key in file if key in exported] for file in files]
    ranges = [range(min(numbers), max(numbers)) for numbers in aside if numbers]
    if last:
        ranges.append(range(min(last), max(exported.values()) + 1))
    absent = [key for key in exported if key not in keys]
    found.lost = [key for key in absent if any(exported[key] in numbers for numbers in ranges)]
    found.moved_away = len(absent) - len(found.lost)
    return found


async def _read(found: TaskFileAudit) -> list[Counter[str]]:
    """How often each task stands in each file: those that were set aside, and last the one that is appended to."""
    files = []
    found.set_aside = await asyncio.to_thread(earlier_files, found.path)
    for path in (*found.set_aside, found.path):
        for look in range(_LOOKS):
            try:
                keys, lines, torn, is_ended = await asyncio.to_thread(_keys_of, path)
            except FileNotFoundError:
                keys, lines, torn, is_ended = Counter(), 0, [], True
            if is_ended or look == _LOOKS - 1:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        files.append(keys)
        found.lines += lines
        found.torn += [(path, number) for number in torn]
    return files


def _keys_of(path: Path) -> tuple[Counter[str], int, list[int], bool]:
    """How often each task stands in the file, how many lines there are, which are none, if the last is ended."""
    keys: Counter[str] = Counter()
    torn: list[int] = []
    number, line = 0, b"\n"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                task = orjson.loads(line)
                keys[str(task["task_id"])] += 1
            except (orjson.JSONDecodeError, KeyError, TypeError):
                torn.append(number)
            else:
                if not line.endswith(b"\n"):
                    torn.append(number)
    return keys, number, torn, line.endswith(b"\n")
