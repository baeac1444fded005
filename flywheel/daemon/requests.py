"""Asks for an action on the state, beside a running daemon or without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.errors import LockedError
from flywheel.records.states import RequestState
from flywheel.store import requests
from flywheel.store.holder import locked
from flywheel.store.kernel.database import Store
from flywheel.store.requests import Request, RequestKind

WAIT_SECONDS: Final = 6.0
"""How long a request waits for the process that holds the instance lock. A daemon looks once a second."""
_PAUSE_SECONDS: Final = 0.1


async def perform(config: Config, kind: RequestKind, arguments: Mapping[str, Any], by: str) -> Request:
    """Ask for an action and wait for it. A request that is still open is carried out later. Raises StoreError."""
    store = await Store.open(config.state_dir)
    try:
        number = await store.write(requests.submit, kind, arguments, by)
        until = time.monotonic() + WAIT_SECONDS
        while True:
            found = await store.read(requests.with_id, number)
            if found.state is not RequestState.OPEN:
                return found
            try:
                async with locked(store, config.state_dir):
                    await store.write(requests.carry_out)
            except LockedError:
                if time.monotonic() >= until:
                    return found
                await asyncio.sleep(_PAUSE_SECONDS)
    finally:
        await store.close()


class RequestWatch:
    """Carries out requests in the process that holds the instance lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = 0

    async def look(self) -> frozenset[RequestKind]:
        """Carry out what waits. The kinds of all requests since the last look, by whomever they were carried out."""
        newest, kinds = await self._store.read(requests.since, self._seen)
        if kinds:
            await self._store.write(requests.carry_out)
        self._seen = newest
        return kinds
