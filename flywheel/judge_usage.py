"""Use of the judge: calls and tokens, and the files by which a round's worker and its daemon share it.

The worker appends a line to `usage.jsonl` for every verdict that it paid for, before anything else sees the verdict.
The daemon books each line once, and writes to `allowance.json` how much the worker may use.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from flywheel.files import PRIVATE, append_jsonl, cut_torn_line, write_json

USAGE_FILE: Final = "usage.jsonl"
ALLOWANCE_FILE: Final = "allowance.json"


class Purpose(StrEnum):
    FILTER = "filter"
    ROUNDS = "rounds"
    GATES = "gates"
    CALIBRATION = "calibration"


@dataclass(frozen=True, slots=True)
class Used:
    """Calls and tokens, with the day (UTC) of the calls."""

    day: str
    purpose: Purpose
    calls: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def today() -> str:
    return datetime.now(UTC).date().isoformat()


class UsageFile:
    """The usage file of one round. All attempts of the round append to it."""

    def __init__(self, round_dir: Path) -> None:
        self.path = round_dir / USAGE_FILE

    def append(self, used: Used) -> None:
        append_jsonl(self.path, [asdict(used)])

    def mend(self) -> None:
        """Remove the incomplete last line of a worker that was killed while it wrote."""
        cut_torn_line(self.path)

    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self, begin: int, end: int = -1) -> tuple[list[Used], int]:
        """The complete lines from byte `begin` to `end` (by default, to the end of the file), and where they end."""
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                lines, newline, _ = file.read(end - begin if end >= 0 else -1).rpartition(b"\n")
        except FileNotFoundError:
            return [], begin
        found = []
        for line in lines.splitlines():
            # Other lines are not by a worker.
            with contextlib.suppress(ValueError, TypeError):
                stored = json.loads(line)
                found.append(Used(**{**stored, "purpose": Purpose(stored["purpose"])}))
        return found, begin + len(lines) + len(newline)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many tokens the round's `usage.jsonl` may hold before its worker has to wait, and why no more."""

    tokens: int
    why: str

    def write(self, round_dir: Path) -> None:
        write_json(round_dir / ALLOWANCE_FILE, asdict(self), mode=PRIVATE)

    @classmethod
    def read(cls, round_dir: Path) -> Allowance | None:
        """None without a readable file."""
        try:
            stored = json.loads((round_dir / ALLOWANCE_FILE).read_bytes())
            return cls(int(stored["tokens"]), str(stored["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
