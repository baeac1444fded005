"""A finding: what one check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from flywheel.errors import ConfigError, FlywheelError


class Result(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` is that of the check, `subject` which of several sources or servers it is about, if there are several.

    `figures` are numbers for programs, with their units in their names. `is_file` is set when a file that people
    write is wrong: configuration, rubric or chain.
    """

    name: str
    result: Result
    found: str
    remedy: str = ""
    subject: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)
    is_file: bool = False

    @classmethod
    def of(cls, name: str, error: FlywheelError, *, subject: str = "", result: Result = Result.FAILED) -> Self:
        """An error as a finding."""
        why = f"cannot {error.attempted}: {error.why.rstrip('.')}"
        return cls(name, result, why, error.hint, subject, is_file=isinstance(error, ConfigError))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "result": self.result.value,
            "found": self.found,
            "do": self.remedy,
            "figures": dict(self.figures),
        }


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"
