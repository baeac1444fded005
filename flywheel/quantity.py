"""Quantities in words: `1 call`, `1,200 calls`."""

from __future__ import annotations


def quantity(number: int, one: str, several: str = "") -> str:
    """`number` with its noun: `one` of them, or `several` (default: `one` with an s)."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
