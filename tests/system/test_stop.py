"""One stop for all work: its reason, its parts, and until when work may go on."""

from __future__ import annotations

import asyncio
import math
import signal
import time

import pytest

from flywheel.system.signals import Stop, StopReason


async def test_a_part_ends_alone_or_with_the_whole_and_the_first_reason_counts() -> None:
    whole = Stop(drain_seconds=60)
    one, other = whole.part(), whole.part()
    assert (whole.reason, whole.deadline) == (None, math.inf)
    one.ask(StopReason.CANCELLED, "its parent was rolled back")
    assert (one.is_set(), other.is_set(), whole.is_set()) == (True, False, False)
    waiting = asyncio.create_task(other.asked())
    whole.ask(StopReason.LOCK_LOST)
    whole.ask(StopReason.FINISHED)
    await asyncio.wait_for(waiting, 60)
    assert time.monotonic() + 60 <= whole.deadline < math.inf
    assert await asyncio.to_thread(other.wait), "threads see it, too"
    assert [each.reason for each in (one, other, whole, whole.part())] == [
        StopReason.CANCELLED, StopReason.LOCK_LOST, StopReason.LOCK_LOST, StopReason.LOCK_LOST,
    ]  # fmt: skip
    assert one.why == "its parent was rolled back"


@pytest.mark.parametrize("signals", [1, 2])
async def test_work_ends_by_itself_or_is_cancelled_after_a_second_signal(signals: int) -> None:
    stop = Stop(drain_seconds=3600)

    async def work() -> str:
        signal.raise_signal(signal.SIGINT)
        await stop.asked()
        for _ in range(10):  # until it is waited for
            await asyncio.sleep(0)
        if signals == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        return "stored"

    async with asyncio.timeout(60):
        assert await stop.during(work()) == ("stored" if signals == 1 else None)
    assert (stop.by, stop.reason) == (signal.SIGINT, StopReason.SIGNAL)
    assert stop.error("work", "").exit_code == 128 + signal.SIGINT
