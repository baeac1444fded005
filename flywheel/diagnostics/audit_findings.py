"""What a deep audit found, in numbers and in words. Plain data: who looks for it is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flywheel.terminal import quantity

SHOWN: Final = 5
"""Names that a message lists, at most."""
_REMEDY: Final = "Put the file back from a backup, or move it away: the next task begins another."


@dataclass(slots=True)
class SourceAudit:
    """One source. `agent_spans` is the sum of `in_ledger`, `missing` and `not_read_yet`; `changed` are in the ledger.

    `gone` are in the ledger and no longer in the source; `told_otherwise` are those whose rows are what they were and
    that would become something else today, by other settings or another version of Flywheel.
    """

    path: Path
    type: str
    condition: str = "ok"
    error: str = ""
    in_ledger: int = 0
    not_read_yet: int = 0
    gone: int = 0
    told_otherwise: int = 0
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def agent_spans(self) -> int:
        return self.in_ledger + len(self.missing) + self.not_read_yet

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        if self.missing:
            found.append(
                f"{quantity(len(self.missing), 'agent span')} of {self.path} not in the ledger: "
                f"{first_few(self.missing)}"
            )
        if self.changed:
            found.append(
                f"{quantity(len(self.changed), 'reply', 'replies')} of {self.path} with rows that say something else "
                f"now: {first_few(self.changed)}. `flywheel ingest --sweep` looks at all of them again."
            )
        return found

    @property
    def line(self) -> str:
        """What was found in words."""
        return _counted(
            f"{self.path} ({self.condition}): {quantity(self.agent_spans, 'agent span')}, "
            f"{self.in_ledger:,} in the ledger",
            (len(self.missing), "missing"),
            (len(self.changed), "changed"),
            (self.not_read_yet, "not read yet"),
            (self.gone, "in the ledger and gone from the source"),
            (self.told_otherwise, "that would be told otherwise today"),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "type": self.type,
            "condition": self.condition,
            "agent_spans": self.agent_spans,
            "in_ledger": self.in_ledger,
            "missing": len(self.missing),
            "changed": len(self.changed),
            "gone": self.gone,
            "not_read_yet": self.not_read_yet,
            "told_otherwise": self.told_otherwise,
            "error": self.error,
        }


@dataclass(slots=True)
class TaskFileAudit:
    """`exported` tasks are in this file, were `moved_away` with an earlier one, or are `lost`.

    `set_aside` are its earlier files, of another format, which are looked at as well; `torn` are lines by file and
    number.

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
    torn: list[tuple[Path, int]] = field(default_factory=list)
    set_aside: list[Path] = field(default_factory=list)
    error: str = ""

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        wrong = []
        if self.twice:
            tasks = quantity(len(self.twice), "task")
            wrong.append(f"{tasks} more than once in {self.path}: {first_few(self.twice)}")
        if self.lost:
            tasks = quantity(len(self.lost), "exported task")
            wrong.append(f"{tasks} missing between others in {self.path}: {first_few(self.lost)}")
        if self.torn:
            by_file = {path: [str(number) for each, number in self.torn if each == path] for path, _ in self.torn}
            wrong += [
                f"{quantity(len(numbers), 'line')} of {path} torn or no task: line {first_few(numbers)}"
                for path, numbers in by_file.items()
            ]
        found += [f"{each}. {_REMEDY}" for each in wrong]
        return found

    @property
    def line(self) -> str:
        """What was found in words."""
        return _counted(
            f"{', '.join(map(str, (self.path, *self.set_aside)))}: {quantity(self.lines, 'line')},"
            f" {quantity(self.exported, 'task')} exported",
            (len(self.twice), "more than once"),
            (len(self.lost), "missing"),
            (len(self.torn), "torn"),
            (self.moved_away, "moved away with an earlier file"),
            (self.waiting, "still to be written"),
            (self.unknown, "that the state does not know"),
        )

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
            "set_aside": [str(path) for path in self.set_aside],
            "error": self.error,
        }


def first_few(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _counted(found: str, *numbers: tuple[int, str]) -> str:
    return "; ".join([found, *(f"{number:,} {what}" for number, what in numbers if number)])
