from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from flywheel.sources.otlp.receiver import Receiver
from flywheel.system import log


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged rarely is logged in each test."""
    monkeypatch.setattr(log, "_logged", {})


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    return tmp_path / "state" / "otlp" / "inbox.sqlite"


@pytest.fixture
async def receiver(inbox: Path) -> AsyncIterator[Receiver]:
    made = Receiver("127.0.0.1:0", inbox, busy_seconds=0.3)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(receiver: Receiver) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=receiver.url.removesuffix("/v1/traces"), timeout=60) as made:
        yield made
