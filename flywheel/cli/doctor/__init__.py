"""The doctor: what each check of an installation returns. The checks read and change nothing.

torch, vLLM and Ray are never imported here: versions come from package metadata, GPUs from a separate process.
"""

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
    """`name` is the check; `subject` is the source or server, where there are several; `remedy` says what to do.

    `figures` are numbers for programs, with their units in their names. `is_file` is set when a file that users write
    is wrong: configuration, rubric or filter chain.
    """

    name: str
    result: Result
    text: str
    remedy: str = ""
    subject: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)
    is_file: bool = False

    @classmethod
    def from_error(cls, name: str, error: FlywheelError, *, subject: str = "") -> Self:
        """An error as a failed check."""
        why = f"cannot {error.attempted}: {error.why.rstrip('.')}"
        return cls(name, Result.FAILED, why, error.hint, subject, is_file=isinstance(error, ConfigError))

    def as_json(self) -> dict[str, Any]:
        shown = {"name": self.name, "subject": self.subject, "result": self.result, "found": self.text}
        return {**shown, "do": self.remedy, "figures": dict(self.figures)}
