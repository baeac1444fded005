"""What is made ahead is bounded by number and by bytes, arrives in order, and ends."""

from __future__ import annotations

import asyncio

import pytest

from flywheel.sources.queue import Ahead, Room


async def settled() -> None:
    """Let every task do what it can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("sizes", "fit"), [([1] * 9, 4), ([30] * 9, 3), ([500, 1, 1], 1), ([1, 500, 1], 1)])
async def test_so_many_and_so_much_at_most(sizes: list[int], fit: int) -> None:
    ahead: Ahead[int] = Ahead(4, 100, Room(1000))
    put: list[int] = []

    async def produce() -> None:
        for number, size in enumerate(sizes):
            await ahead.put(number, size)
            put.append(number)
        ahead.end()

    producer = asyncio.create_task(produce())
    await settled()
    assert len(put) == fit
    taken = []
    while (item := await asyncio.wait_for(ahead.take(), 10)) is not None:
        taken.append(item)
    assert taken == list(range(len(sizes)))
    await producer


async def test_who_waits_is_told_of_the_end() -> None:
    ahead: Ahead[int] = Ahead(4, 100, Room(1000))
    taker = asyncio.create_task(ahead.take())
    await settled()
    ahead.end()
    assert await asyncio.wait_for(taker, 10) is None


async def test_many_share_what_they_have_but_none_is_without() -> None:
    room = Room(100)
    many: list[Ahead[int]] = [Ahead(10, 1000, room) for _ in range(3)]
    for ahead in many:
        await asyncio.wait_for(ahead.put(0, 40), 10)
    assert room.taken == 120
    more = asyncio.create_task(many[0].put(1, 30))
    await settled()
    assert not more.done()
    many[1].clear()
    assert await many[2].take() == 0
    assert await many[0].take() == 0
    await asyncio.wait_for(more, 10)
    assert room.taken == 30
    many[0].clear()
    assert room.taken == 0
