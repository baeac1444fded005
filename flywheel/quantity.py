"""Quantities in words: `1 call`, `1,200 calls`, `2 min 5 s`."""

from __future__ import annotations


def quantity(number: int, one: str, several: str = "") -> str:
    """`number` with its noun: `one` of them, or `several` (default: `one` with an s)."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """As people say it: `8 s`, `2 min 5 s`, `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
