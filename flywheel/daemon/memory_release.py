"""Returns free memory to the operating system while the daemon is idle."""

from __future__ import annotations

import asyncio
from typing import Final

from flywheel.store.kernel.database import Store
from flywheel.system.process_tuning import trim_malloc

IDLE_CHECKS: Final = 2
"""Checks without work before memory is released."""
CHECKS_PER_RELEASE: Final = 240
"""While the daemon stays idle, memory is released again after so many checks: full scans use memory too."""


class MemoryRelease:
    """`check` is called at regular intervals, `note_work` whenever there was something to ingest or judge."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._idle_checks = 0

    def note_work(self) -> None:
        self._idle_checks = 0

    async def check(self) -> None:
        self._idle_checks += 1
        if self._idle_checks % CHECKS_PER_RELEASE == IDLE_CHECKS:
            await self._store.release_memory()
            await asyncio.to_thread(trim_malloc)
