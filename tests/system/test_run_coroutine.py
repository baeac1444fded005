"""A coroutine is run in a script and in a notebook, and an interrupted cell ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def test_an_interrupt_while_its_thread_is_started_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, function: Callable[..., Any]) -> None:
        submit(pool, function)
        # The thread has had time to begin.
        begun.wait(0.3)
        raise KeyboardInterrupt

    async def work() -> None:
        begun.set()

    async def cell() -> None:
        run_coroutine(work())

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert not begun.is_set()
