"""Deploying: a swap with its record, by the daemon after a round or by hand, and the way back."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from flywheel.config import Config
from flywheel.errors import FlywheelError, ServeError
from flywheel.files import tree_sha256
from flywheel.round import Probe
from flywheel.serving.client import Replica
from flywheel.serving.swap import SwapReport, reconcile, swap
from flywheel.states import AdapterState, DeploymentState
from flywheel.store import deployments, rounds
from flywheel.store.database import Store
from flywheel.store.transitions import move

log = logging.getLogger(__name__)


class Deployer:
    """Points the alias at adapters. Several processes may hold one: the database orders what they do."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._alias = config.model.alias

    def _replicas(self) -> list[Replica]:
        name = self._config.serving.api_key_env
        key = os.environ.get(name) if name else None
        return [Replica(url, key) for url in self._config.serving.urls]

    async def deploy(self, adapter: str | None, reason: str) -> SwapReport:
        """Swap to `adapter` (None: the base model). Raises ServeError; what served before then still does."""
        path, probe = await self._checked(adapter)
        number = await self._store.write(deployments.request, self._alias, self._config.serving.urls, adapter, reason)

        async def on_state(state: DeploymentState) -> None:
            if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                await self._store.write(deployments.advance, number, state)

        replicas = self._replicas()
        try:
            report = await swap(replicas, self._alias, adapter, path, probe, self._config.serving, on_state)
        except BaseException as error:
            why = str(error) if isinstance(error, FlywheelError) else f"stopped: {type(error).__name__}"
            await asyncio.shield(self._store.write(deployments.fail, number, why))
            raise
        finally:
            await asyncio.gather(*(replica.close() for replica in replicas))
        await self._store.write(deployments.activate, number, self._alias, report.as_json())
        log.info("%s is now answered by %s (%s)", self._alias, adapter or "the base model", reason)
        return report

    async def _checked(self, adapter: str | None) -> tuple[Path | None, Probe | None]:
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
        return path, Probe.model_validate(row.probe) if row.probe else None

    async def rollback(self, to: str | None = None) -> tuple[str | None, SwapReport]:
        """Swap back: to the adapter that served before, or to `to` ("base": the base model)."""
        active = await self._store.read(deployments.active, self._alias)
        if to is None and active is None:
            raise ServeError(
                f"roll {self._alias} back",
                "nothing was deployed yet",
                "The base model is answering; there is no way back.",
            )
        target = (active.previous if active else None) if to is None else (None if to == "base" else to)
        return target, await self.deploy(target, "rollback")

    async def reconcile(self) -> bool:
        """Bring servers that forgot the active adapter (a restart) back to it; whether anything had to be done."""
        active = await self._store.read(deployments.active, self._alias)
        if active is None:
            return False
        row = await self._store.read(rounds.adapter, active.adapter) if active.adapter else None
        if active.adapter and row is None:
            return False
        replicas = self._replicas()
        try:
            return await reconcile(replicas, self._alias, active.adapter, Path(row.path) if row else None)
        finally:
            await asyncio.gather(*(replica.close() for replica in replicas))
