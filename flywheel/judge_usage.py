"""What the judge was used for, and how a round's worker and its daemon tell each other of it.

The worker appends a line to `usage.jsonl` for every verdict it has paid for, before anybody sees the verdict; the
daemon books the lines, each once. In `allowance.json` the daemon says how much the worker may use.
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
    """Calls and tokens, and the day (UTC) on which they were made."""

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
    """That of one round. It goes on through all attempts: what they used was used."""

    def __init__(self, round_dir: Path) -> None:
        self.path = round_dir / USAGE_FILE

    def append(self, used: Used) -> None:
        append_jsonl(self.path, [asdict(used)])

    def mend(self) -> None:
        """Cut what a worker that died in the middle of a line has left of it."""
        cut_torn_line(self.path)

    def size(self) -> int:
        """In bytes."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, begin: int, end: int = -1) -> tuple[list[Used], int]:
        """The whole lines from that byte on (to `end`, if there is one), and where they end."""
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                lines, _, _ = file.read(end - begin if end >= 0 else -1).rpartition(b"\n")
        except FileNotFoundError:
            return [], begin
        found = []
        for line in lines.splitlines():
            # What is no such line was not written by a worker.
            with contextlib.suppress(ValueError, TypeError):
                told = json.loads(line)
                found.append(Used(**{**told, "purpose": Purpose(told["purpose"])}))
        return found, begin + len(lines) + (1 if lines else 0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many tokens may stand in the round's `usage.jsonl` before its worker has to wait, and why no more."""

    tokens: int
    why: str

    def write(self, round_dir: Path) -> None:
        write_json(round_dir / ALLOWANCE_FILE, asdict(self), mode=PRIVATE)

    @classmethod
    def read(cls, round_dir: Path) -> Allowance | None:
        """None where the daemon says nothing."""
        try:
            told = json.loads((round_dir / ALLOWANCE_FILE).read_bytes())
            return cls(int(told["tokens"]), str(told["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
