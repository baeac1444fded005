"""Marks that were handed out last and may not be stored yet: who asks for them is told these."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from flywheel.trace import Mark

MOST: Final = 8_000
"""A mark is about 400 bytes. At most fourteen steps of 500 rows are read ahead, with a trace for each row.

A look back at the newest rows finds their marks here too, and need not ask the ledger."""


class FreshMarks:
    """The last marks, by trace."""

    def __init__(self) -> None:
        self._marks: OrderedDict[str, Mark] = OrderedDict()

    def add(self, mark: Mark) -> None:
        self._marks.pop(mark.trace_id, None)
        self._marks[mark.trace_id] = mark
        if len(self._marks) > MOST:
            self._marks.popitem(last=False)

    def get(self, trace_id: str) -> Mark | None:
        """The mark of a trace that was added last; None where that is long ago, or never was."""
        return self._marks.get(trace_id)

    def clear(self) -> None:
        self._marks.clear()
