"""The queue is bounded by items and bytes, keeps its order, and ends."""

from __future__ import annotations

import asyncio

import pytest

from flywheel.sources.studio_connector import BoundedQueue, ByteBudget


async def settled() -> None:
    """Let every task do what it can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("sizes", "fit"), [([1] * 9, 4), ([30] * 9, 3), ([500, 1, 1], 1), ([1, 500, 1], 1)])
async def test_so_many_and_so_much_at_most(sizes: list[int], fit: int) -> None:
    queue: BoundedQueue[int] = BoundedQueue(4, 100, ByteBudget(1000))
    put: list[int] = []

    async def produce() -> None:
        for number, size in enumerate(sizes):
            await queue.put(number, size)
            put.append(number)
        queue.end()

    producer = asyncio.create_task(produce())
    await settled()
    assert len(put) == fit
    taken = []
    while (item := await asyncio.wait_for(queue.take(), 10)) is not None:
        taken.append(item)
    assert taken == list(range(len(sizes)))
    await producer


async def test_who_waits_is_told_of_the_end() -> None:
    queue: BoundedQueue[int] = BoundedQueue(4, 100, ByteBudget(1000))
    taker = asyncio.create_task(queue.take())
    await settled()
    queue.end()
    assert await asyncio.wait_for(taker, 10) is None


async def test_many_share_what_they_have_but_none_is_without() -> None:
    budget = ByteBudget(100)
    queues: list[BoundedQueue[int]] = [BoundedQueue(10, 1000, budget) for _ in range(3)]
    for queue in queues:
        await asyncio.wait_for(queue.put(0, 40), 10)
    assert budget.used == 120
    more = asyncio.create_task(queues[0].put(1, 30))
    await settled()
    assert not more.done()
    queues[1].clear()
    assert await queues[2].take() == 0
    assert await queues[0].take() == 0
    await asyncio.wait_for(more, 10)
    assert budget.used == 30
    queues[0].clear()
    assert budget.used == 0
