"""Deploying: a swap with its record, by the daemon after a round or by hand, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from flywheel.config import Config
from flywheel.daemon.lock import swap_lock
from flywheel.errors import FlywheelError, ServeError
from flywheel.files import tree_sha256
from flywheel.round import Probe
from flywheel.serving.client import Replica
from flywheel.serving.swap import SwapReport, reconcile, retire, rollback, swap
from flywheel.states import AdapterState, DeploymentState
from flywheel.store import deployments, rounds
from flywheel.store.database import Store
from flywheel.store.transitions import move

WAIT_SECONDS = 120.0
"""How long a swap waits for another one to end."""

log = logging.getLogger(__name__)


class Deployer:
    """Points the alias at adapters. Several processes may hold one: the database orders what they do."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._alias = config.model.alias

    @contextlib.asynccontextmanager
    async def _replicas(self, wait_seconds: float) -> AsyncIterator[list[Replica]]:
        """The servers, for the one who may touch them now."""
        name = self._config.serving.api_key_env
        key = os.environ.get(name) if name else None
        timeout = self._config.serving.load_timeout_seconds
        async with swap_lock(self._config.state_dir, wait_seconds), contextlib.AsyncExitStack() as stack:
            urls = self._config.serving.urls
            yield [await stack.enter_async_context(Replica(url, key, timeout_seconds=timeout)) for url in urls]

    async def deploy(self, adapter: str | None, reason: str) -> SwapReport:
        """Swap to `adapter` (None: the base model). Raises ServeError; what served before then still does."""
        path, probe = await self._checked(adapter)
        async with self._replicas(WAIT_SECONDS) as replicas:
            number = await self._store.write(
                deployments.request, self._alias, self._config.serving.urls, adapter, reason
            )

            async def on_state(state: DeploymentState) -> None:
                if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                    await self._store.write(deployments.advance, number, state)

            work = swap(replicas, self._alias, adapter, path, probe, self._config.serving, on_state)
            return await self._recorded(number, adapter, reason, work)

    async def _recorded(
        self, number: int, adapter: str | None, reason: str, work: Coroutine[Any, Any, SwapReport]
    ) -> SwapReport:
        try:
            report = await work
        except BaseException as error:
            why = str(error) if isinstance(error, FlywheelError) else f"stopped: {type(error).__name__}"
            await asyncio.shield(self._store.write(deployments.fail, number, why))
            raise
        await asyncio.shield(self._store.write(deployments.activate, number, self._alias, report.as_json()))
        log.info("%s is now answered by %s (%s)", self._alias, adapter or "the base model", reason)
        return report

    async def _checked(self, adapter: str | None) -> tuple[str | None, Probe | None]:
        if adapter is None:
            return None, None
        attempted = f"deploy adapter {adapter}"
        row = await self._store.read(rounds.adapter, adapter)
        if row is None:
            raise ServeError(attempted, "there is no such adapter", "List what there is with `flywheel status`.")
        path = Path(row.path)
        found = await asyncio.to_thread(tree_sha256, path) if path.is_dir() else ""  # noqa: ASYNC240 - one stat
        if row.state == AdapterState.CORRUPT or found != row.sha256:
            if row.state != AdapterState.CORRUPT:
                await self._store.write(move, row.id, AdapterState(row.state), AdapterState.CORRUPT, "files changed")
            raise ServeError(
                attempted,
                f"the files in {path} are not those that were evaluated",
                "Restore them from a backup, or deploy another adapter.",
            )
        return str(path), Probe.model_validate(row.probe) if row.probe else None

    async def rollback(self, to: str | None = None) -> tuple[str | None, SwapReport]:
        """Go back at once: to the adapter that served before, or to `to` ("base": the base model)."""
        active = await self._store.read(deployments.active, self._alias)
        if to is None and active is None:
            raise ServeError(
                f"roll {self._alias} back",
                "nothing was deployed yet",
                "The base model is answering; there is no way back.",
            )
        target = (active.previous if active else None) if to is None else (None if to == "base" else to)
        path, _probe = await self._checked(target)
        async with self._replicas(WAIT_SECONDS) as replicas:
            number = await self._store.write(
                deployments.request, self._alias, self._config.serving.urls, target, "rollback"
            )
            work = rollback(replicas, self._alias, target, path, self._config.serving)
            return target, await self._recorded(number, target, "rollback", work)

    async def reconcile(self) -> SwapReport | None:
        """Bring servers that forgot the active adapter (a restart) back to it, and unload versions long out of use.

        Raises LockedError while somebody else moves the alias.
        """
        async with self._replicas(0) as replicas:
            active = await self._store.read(deployments.active, self._alias)
            if active is None:
                return None
            row = await self._store.read(rounds.adapter, active.adapter) if active.adapter else None
            path = row.path if row is not None else None
            probe = Probe.model_validate(row.probe) if row is not None and row.probe else None
            report = await reconcile(replicas, self._alias, active.adapter, path, probe, self._config.serving)
            if not report.errors:
                drain = self._config.serving.drain_seconds
                keep = await self._store.read(deployments.in_use, self._alias, drain)
                # Those that served until a moment ago are among `keep`: there is nothing to wait for here.
                at_once = self._config.serving.model_copy(update={"drain_seconds": 0})
                await retire(replicas, self._alias, keep, at_once)
            return report
