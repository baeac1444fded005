"""What the ledger remembers of a source's traces, for the thread that reads the source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from flywheel.store import checkpoints
from flywheel.store.database import Store
from flywheel.trace import Mark

T = TypeVar("T")

_BITS: Final = 1 << 23
"""A megabyte. Of a million names one in twenty is mistaken for one that was met, which costs a look at the ledger."""


class Met:
    """Names that were met (Bloom 1970, with two hashes): one that was is never taken for new."""

    def __init__(self) -> None:
        self._bits = bytearray(_BITS // 8)

    def add(self, name: str) -> bool:
        """Note a name; whether it may have been met before."""
        number = hash(name)
        known = True
        for place in (number % _BITS, (number >> 32) % _BITS):
            bit = 1 << (place & 7)
            known = known and bool(self._bits[place >> 3] & bit)
            self._bits[place >> 3] |= bit
        return known


class LedgerMemory:
    """The ledger's memory of a source, asked from the reader's thread; to be made on the loop.

    A `first` pass is the only one that stores something meanwhile. If there is nothing to remember when it begins,
    only traces that it meets again need to be asked for.
    """

    def __init__(self, store: Store, source: int, *, first: bool = False) -> None:
        self._store = store
        self._source = source
        self._first = first
        self._met: Met | None = None
        self._loop = asyncio.get_running_loop()

    def open_marks(self) -> Sequence[Mark]:
        if self._first and not self._ask(checkpoints.has_marks):
            self._met = Met()
            return []
        return self._ask(checkpoints.open_marks)

    def marks(self, trace_ids: Sequence[str]) -> Mapping[str, Mark]:
        if self._met is not None:
            trace_ids = [trace for trace in trace_ids if self._met.add(trace)]
        return self._ask(checkpoints.marks_of, trace_ids) if trace_ids else {}

    def _ask(self, question: Callable[..., T], *values: object) -> T:
        asked = self._store.read(question, self._source, *values)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
