"""An idle daemon returns memory to the system: after its work, not during it, and the store goes on working."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.daemon import service
from flywheel.daemon.service import CHECKS_PER_RELEASE, IDLE_CHECKS, MemoryRelease
from flywheel.store.kernel.database import Store, version_of
from flywheel.store.kernel.schema import SCHEMA_VERSION


async def test_memory_is_released_once_after_work_and_again_after_a_long_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(service, "trim_malloc", lambda: released.append(1))
    store = await Store.open(tmp_path)
    release = MemoryRelease(store)
    for _ in range(3 * IDLE_CHECKS):
        release.note_work()
        await release.check()
    assert not released
    for _ in range(CHECKS_PER_RELEASE - 1):
        await release.check()
    assert len(released) == 1
    for _ in range(IDLE_CHECKS):
        await release.check()
    assert len(released) == 2
    assert await store.read(version_of) == await store.write(version_of) == SCHEMA_VERSION
    await store.close()
