"""The task file compared with the state, read-only and beside a running daemon.

Every exported task must be in the task file once, every line complete. If another program moves the file away, the
next export starts a new one. So tasks older than all in the file were moved away with an earlier file; only tasks
between its first and its last one are missing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.store import task_file
from flywheel.store.kernel.database import Store
from flywheel.system.terminal import quantity

SHOWN: Final = 5
"""Names that a message lists."""
_ATTEMPTS: Final = 10
_PAUSE_SECONDS: Final = 0.1
"""A line that is being appended is complete soon."""


@dataclass(slots=True)
class TaskFileAudit:
    """The result. `exported` tasks are in the file, were `moved_away` with an earlier one, or are `lost`.

    `waiting` tasks are still to be exported. `unknown` lines are tasks that the state does not have: an older state
    was restored, or another program wrote them. `torn` are the numbers of incomplete lines.
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
        wrong = []
        if self.twice:
            wrong.append(
                f"{quantity(len(self.twice), 'task')} more than once in {self.path}: {first_names(self.twice)}"
            )
        if self.lost:
            tasks = quantity(len(self.lost), "exported task")
            wrong.append(f"{tasks} missing between others in {self.path}: {first_names(self.lost)}")
        if self.torn:
            numbers = first_names([str(number) for number in self.torn])
            wrong.append(f"{quantity(len(self.torn), 'line')} of {self.path} torn or no task: line {numbers}")
        remedy = "Restore the file from a backup, or move it away: the next task starts a new one."
        return [*([self.error] if self.error else []), *(f"{each}. {remedy}" for each in wrong)]

    @property
    def line(self) -> str:
        """The result in one line."""
        return with_counts(
            f"{self.path}: {quantity(self.lines, 'line')}, {quantity(self.exported, 'task')} exported",
            {
                "more than once": len(self.twice),
                "missing": len(self.lost),
                "torn": len(self.torn),
                "moved away with an earlier file": self.moved_away,
                "not exported yet": self.waiting,
                "unknown to the state": self.unknown,
            },
        )

    def as_json(self) -> dict[str, Any]:
        counts = ("lines", "exported", "waiting", "moved_away", "unknown")
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in counts},
            **{name: len(getattr(self, name)) for name in ("twice", "lost", "torn")},
            "error": self.error,
        }


def first_names(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def with_counts(begin: str, counts: dict[str, int]) -> str:
    """A line of a report with the counts that are not zero."""
    return "; ".join([begin, *(f"{number:,} {what}" for what, number in counts.items() if number)])


async def compare_task_file(store: Store, path: Path) -> TaskFileAudit:
    """Compare the task file with the state. Tasks may be appended meanwhile."""
    # The state is read first: tasks marked as exported are in the file.
    exported = await store.read(task_file.exported_keys)
    waiting = await store.read(task_file.count_unexported)
    audit = TaskFileAudit(path, exported=len(exported), waiting=waiting)
    try:
        keys = await _read(audit)
    except OSError as error:
        audit.error = f"cannot read the task file {error.filename or path}: {error.strerror or error}."
        return audit
    audit.twice = [key for key, times in keys.items() if times > 1]
    audit.unknown = len(await store.read(task_file.unknown_keys, [key for key in keys if key not in exported]))
    absent = [key for key in exported if key not in keys]
    first = min((exported[key] for key in keys if key in exported), default=None)
    audit.lost = [key for key in absent if first is not None and exported[key] > first]
    audit.moved_away = len(absent) - len(audit.lost)
    return audit


async def _read(audit: TaskFileAudit) -> Counter[str]:
    """How often the file has each task."""
    for attempt in range(_ATTEMPTS):
        keys, audit.lines, audit.torn, is_complete = await asyncio.to_thread(_keys_of, audit.path)
        if is_complete or attempt == _ATTEMPTS - 1:
            break
        await asyncio.sleep(_PAUSE_SECONDS)
    return keys


def _keys_of(path: Path) -> tuple[Counter[str], int, list[int], bool]:
    """How often a file has each task, how many lines it has, which are no task, and if the last line is complete."""
    keys: Counter[str] = Counter()
    torn: list[int] = []
    number, line = 0, b"\n"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    keys[str(orjson.loads(line)["task_id"])] += 1
                except (orjson.JSONDecodeError, KeyError, TypeError):
                    torn.append(number)
                else:
                    if not line.endswith(b"\n"):
                        torn.append(number)
    except FileNotFoundError:
        pass
    return keys, number, torn, line.endswith(b"\n")
