from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flywheel.store.kernel.database import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "state")
    yield store
    await store.close()
