"""What the task file was when it was last written, by which it is noticed that another program has cut it since.

Lines are only ever appended. A file that begins as it did and is shorter has lost some of them, and what is appended
from then on does not bring them back. One that begins otherwise is a new one: the earlier one was moved away.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

from sqlalchemy import Connection

from flywheel.store.pipeline_counts import note, noted

_NOTE: Final = "task_file"
_BEGINNING: Final = 40
"""Bytes from which on lines differ: the id of the first task is in them."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """A task file at one time. `lacking` are the bytes that it has lost."""

    path: str
    begins: str
    size: int
    lacking: int = 0

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The file as it is now; None without one that can be read: whoever writes to it says why."""
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                begins = file.read(_BEGINNING).decode("latin-1")
                return cls(str(path), begins, file.seek(0, 2))
        except OSError:
            return None

    def since(self, before: FileMark | None) -> FileMark:
        """This file with what it lacks of what it was before."""
        if before is None or before.path != self.path or not before.begins.startswith(self.begins):
            return self
        lacking = before.size + before.lacking - self.size
        # One byte is the end of the last line, which is put back.
        return replace(self, lacking=lacking if lacking > 1 else 0)

    def grown_from(self, before: FileMark | None) -> FileMark:
        """This file, to which only lines were appended since `before`: it lacks what it lacked."""
        is_same = before is not None and before.path == self.path and before.begins == self.begins
        return replace(self, lacking=before.lacking) if before is not None and is_same else self

    @property
    def warning(self) -> str:
        """What is to be said of it; empty when nothing is."""
        if not self.lacking:
            return ""
        return (
            f"{self.path} was cut by another program: it lacks {self.lacking:,} bytes that were written to it. "
            "`flywheel audit --deep` names the tasks. Put it back from a backup, or move it away; `flywheel export` "
            "writes all tasks anew"
        )


def kept(conn: Connection) -> FileMark | None:
    """What was written down last."""
    found = noted(conn, _NOTE)
    return FileMark(**json.loads(found)) if found else None


def keep(conn: Connection, mark: FileMark | None) -> None:
    note(conn, _NOTE, json.dumps(asdict(mark)) if mark is not None else "")


def warning(conn: Connection) -> str:
    """What `status` says of the task file as it was when it was looked at last."""
    mark = kept(conn)
    return mark.warning if mark is not None else ""
