"""A coroutine is run in a script and in a notebook, and an interrupted cell ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from flywheel.system.signals import run_coroutine


async def answer() -> int:
    await asyncio.sleep(0)
    return 7


def test_it_runs_where_no_loop_runs() -> None:
    assert run_coroutine(answer()) == 7


async def test_it_runs_where_a_loop_runs() -> None:
    assert run_coroutine(answer()) == 7

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_coroutine(fails())


def test_an_interrupt_cancels_it_and_waits_for_its_end() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    def interrupt() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        threading.Thread(target=interrupt).start()
        run_coroutine(work())

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert ended.is_set()
