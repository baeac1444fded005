"""Prints the line of `flywheel serve` with its address when it answers requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

from flywheel.system.server_limits import Message, Send

POLL_SECONDS = 0.05


def announcing(send: Send, url: str, told: Callable[[], str]) -> Send:
    """A `send` for the server's lifespan events. After the start, when the server can be reached at `url`, it prints
    the line that `told` returns."""
    tasks: set[asyncio.Task[None]] = set()

    async def passed(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            # The application is ready; the server starts to listen after this.
            tasks.add(asyncio.create_task(_announce(url, told)))

    return passed


async def _announce(url: str, told: Callable[[], str]) -> None:
    place = urlsplit(url)
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.close()
            break
        await asyncio.sleep(POLL_SECONDS)
    print(told(), flush=True)
