"""What a check found."""

from __future__ import annotations

from typing import NamedTuple


class Found(NamedTuple):
    """How far the criterion holds, in 0…1, and why."""

    value: float
    reason: str


def found(holds: bool, reason: str) -> Found:
    return Found(1.0 if holds else 0.0, reason)
