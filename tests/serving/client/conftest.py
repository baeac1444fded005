"""Two replicas that serve a version."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flywheel.serving.client.replica_client import Replica
from tests.factories.swap import Fleet
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, replica


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        apps = [FakeVllm({BASE: PROBE.second.base}) for _ in range(2)]
        urls = [stack.enter_context(replica(app)) for app in apps]
        replicas = [await stack.enter_async_context(Replica(url, timeout_seconds=30)) for url in urls]
        fleet = Fleet(tmp_path, apps, replicas)
        for each in replicas:
            await each.load("agent@r0001", fleet.paths["r0001"])
            await each.point("agent", "agent@r0001", BASE, fleet.paths["r0001"])
        yield fleet
