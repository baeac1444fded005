"""Requests to a dead engine fail; `ray_session/test_endpoint.py` kills a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flywheel.training.engine import served_application
from flywheel.training.engine.served_application import unless_dead
from tests.waiting import until


async def answer() -> int:
    return 7


async def test_a_living_engine_answers() -> None:
    llm = SimpleNamespace(errored=False)
    assert await unless_dead(llm, answer()) == 7
    # A request that was answered is answered.
    assert await unless_dead(SimpleNamespace(errored=True), answer()) == 7


async def test_a_request_that_waits_for_a_dead_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_application, "LOOK_SECONDS", 0.01)
    looks: list[bool] = []
    enough = asyncio.Event()

    class Dying:
        dead_error = RuntimeError("dead")

        @property
        def errored(self) -> bool:
            looks.append(enough.is_set())
            return looks[-1]

    left = asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    waiting = asyncio.create_task(unless_dead(Dying(), for_ever()))
    await until(lambda: len(looks) > 2, "looks at a living engine")
    assert not waiting.done()
    enough.set()
    with pytest.raises(RuntimeError, match="dead"):
        await waiting
    await left.wait()


async def test_a_cancelled_request_is_aborted() -> None:
    begun, aborted = asyncio.Event(), asyncio.Event()

    async def for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()

    waiting = asyncio.create_task(unless_dead(SimpleNamespace(errored=False), for_ever()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await aborted.wait()
