"""The task file compared with the state: every exported task once, every line whole.

Another program may move the file away; the next export begins a new one. So tasks that are older than all in the file
went with an earlier one, and only those between its first and its last are lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.store import holdings
from flywheel.store.database import Store

SHOWN: Final = 5
"""Names that a message lists, at most."""
_LOOKS: Final = 10
_PAUSE_SECONDS: Final = 0.1
"""A line that is just being appended is whole soon."""


@dataclass(slots=True)
class TaskFile:
    """`exported` tasks are in this file, were `moved_away` with an earlier one, or are `lost`.

    `waiting` ones are still to be written. `unknown` lines are tasks that the state has not: an older state was put
    back, or another program wrote them.
    """

    path: Path
    lines: int = 0
    exported: int = 0
    waiting: int = 0
    moved_away: int = 0
    unknown: int = 0
    twice: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        if self.twice:
            found.append(f"{len(self.twice)} tasks stand more than once in {self.path}: {first_few(self.twice)}")
        if self.lost:
            found.append(
                f"{len(self.lost)} exported tasks are missing between others in {self.path}: {first_few(self.lost)}"
            )
        if self.torn:
            numbers = first_few([str(number) for number in self.torn])
            found.append(f"{len(self.torn)} lines of {self.path} are torn or no tasks: line {numbers}")
        return found

    @property
    def line(self) -> str:
        """What was found in words."""
        words = [
            f"{number} {what}"
            for number, what in (
                (len(self.twice), "more than once"),
                (len(self.lost), "missing"),
                (len(self.torn), "torn lines"),
                (self.moved_away, "moved away with an earlier file"),
                (self.waiting, "still to be written"),
                (self.unknown, "that the state does not know"),
            )
            if number
        ]
        return f"{self.path}: {'; '.join([f'{self.lines} lines, {self.exported} tasks exported', *words])}"

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "lines": self.lines,
            "exported": self.exported,
            "waiting": self.waiting,
            "moved_away": self.moved_away,
            "unknown": self.unknown,
            "twice": len(self.twice),
            "lost": len(self.lost),
            "torn": len(self.torn),
            "error": self.error,
        }


def first_few(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


async def compare_task_file(store: Store, path: Path) -> TaskFile:
    """The task file with the state, beside whoever appends to it."""
    # The state first: what is marked as exported is in the file.
    exported = await store.read(holdings.exported)
    waiting = await store.read(holdings.count_unexported)
    found = TaskFile(path, exported=len(exported), waiting=waiting)
    try:
        keys = await _read(found)
    except FileNotFoundError:
        found.moved_away = len(exported)
        return found
    except OSError as error:
        found.error = f"cannot read the task file {path}: {error.strerror or error}."
        return found
    found.twice = [key for key, times in keys.items() if times > 1]
    found.unknown = len(await store.read(holdings.unknown_keys, [key for key in keys if key not in exported]))
    first = min((exported[key] for key in keys if key in exported), default=None)
    absent = [key for key in exported if key not in keys]
    found.lost = [key for key in absent if first is not None and exported[key] > first]
    found.moved_away = len(absent) - len(found.lost)
    return found


async def _read(found: TaskFile) -> Counter[str]:
    for look in range(_LOOKS):
        keys, found.lines, found.torn, is_ended = await asyncio.to_thread(_keys_of, found.path)
        if is_ended or look == _LOOKS - 1:
            break
        await asyncio.sleep(_PAUSE_SECONDS)
    return keys


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
