"""Deploying: a swap with its record, by the daemon after a round or by hand, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row

from flywheel.adapter_files import unsafe_weights
from flywheel.config import Config
from flywheel.daemon.lock import swap_lock
from flywheel.errors import FlywheelError, LockedError, ServeError
from flywheel.files import tree_sha256
from flywheel.round import AdapterRef, Probe
from flywheel.serving.adapter_swap import Proven, reconcile, rollback, swap
from flywheel.serving.adapter_unloading import retire
from flywheel.serving.health_check import ask, look
from flywheel.serving.replica_client import Replica
from flywheel.serving.server_keys import admin_key
from flywheel.serving.swap_report import ReplicaReport, RollbackError, SwapReport
from flywheel.states import AdapterState, DeploymentState
from flywheel.store import deployments, rounds
from flywheel.store.database import Store
from flywheel.store.transitions import move

WAIT_SECONDS = 120.0
"""How long a swap waits for another one to end."""


class Deployer:
    """Points the alias at adapters. Several processes may hold one: the database orders what they do."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._alias = config.model.alias
        self._proven: dict[str, Proven] = {}

    @contextlib.asynccontextmanager
    async def _replicas(self, wait_seconds: float) -> AsyncIterator[list[Replica]]:
        """The servers, for the one who may touch them now."""
        serving = self._config.serving
        keys = {url: admin_key(self._config, url, f"ask {url}") for url in serving.urls}
        async with swap_lock(self._config.state_dir, wait_seconds), contextlib.AsyncExitStack() as stack:
            await self._give_up()
            yield [
                await stack.enter_async_context(Replica(url, key, timeout_seconds=serving.load_timeout_seconds))
                for url, key in keys.items()
            ]

    async def recover(self) -> int:
        """Give up the swaps that dead processes left half done, and say how many; one under way is let alone."""
        try:
            async with swap_lock(self._config.state_dir, 0):
                return await self._give_up()
        except LockedError:
            return 0

    async def _give_up(self) -> int:
        # Who holds the lock knows that nobody is at work on what is unfinished.
        if not await self._store.read(deployments.unfinished):
            return 0
        return await self._store.write(deployments.fail_unfinished, "its process died")

    async def deploy(self, adapter: str | None, reason: str) -> SwapReport:
        """Swap to `adapter` (None: the base model). Raises ServeError; what served before then still does."""
        attempted = f"deploy adapter {adapter}"
        row = await self._checked(adapter, attempted)
        if row is not None and not row.probe:
            raise ServeError(
                attempted,
                "its round measured nothing that could prove it",
                "Deploy another adapter.",
            )
        probe = Probe.model_validate(row.probe) if row is not None else None
        async with self._replicas(WAIT_SECONDS) as servers:
            # Before it is written down: a server that is away all night leaves no row for each time it was tried.
            await ask(servers, self._alias)
            number = await self._request(adapter, reason)

            async def on_state(state: DeploymentState, report: SwapReport | None = None) -> None:
                if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                    await self._store.write(deployments.advance, number, state)
                elif state is DeploymentState.ACTIVE and report is not None:
                    await self._activate(number, report)

            try:
                report = await swap(servers, self._alias, _ref(row), probe, self._config.serving, on_state)
            except BaseException as error:
                await self._fail(number, error)
                raise
        return report

    async def _request(self, adapter: str | None, reason: str) -> int:
        urls = self._config.serving.urls
        return await self._store.write(deployments.request, self._alias, urls, adapter, reason)

    async def _activate(self, number: int, report: SwapReport) -> None:
        writing = asyncio.ensure_future(self._store.write(_activated, number, report))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Once it is written the swap has happened, and must not be taken back: the stop came too late.
            await asyncio.wait([writing])
            writing.result()

    async def _fail(self, number: int, error: BaseException) -> None:
        await asyncio.shield(self._store.write(_failed, number, error))

    async def _checked(self, adapter: str | None, attempted: str) -> Row[Any] | None:
        """The adapter, whose files are those that were evaluated; None for the base model. Raises ServeError."""
        if adapter is None:
            return None
        row = await self._store.read(rounds.adapter, adapter)
        if row is None:
            raise ServeError(attempted, "there is no such adapter", "List what there is with `flywheel status`.")
        found, why = await asyncio.to_thread(_hash_of, Path(row.path))
        state = AdapterState(row.state)
        if found != row.sha256:
            if found and state not in (AdapterState.CORRUPT, AdapterState.REMOVED):
                await self._store.write(move, row.id, state, AdapterState.CORRUPT, "files changed")
            if state is AdapterState.REMOVED:
                why = f"the files in {row.path} were removed: nothing needed them any more (retention)"
            raise ServeError(
                attempted,
                why or f"the files in {row.path} are not those that were evaluated",
                "Restore them from a backup, or deploy another adapter. "
                "`flywheel rollback --to base` lets the base model answer.",
            )
        if state in (AdapterState.CORRUPT, AdapterState.REMOVED):
            await self._store.write(move, row.id, state, AdapterState.READY, "its files are whole again")
        return row

    def _check_base(self, row: Row[Any] | None, attempted: str, hint: str) -> None:
        base = self._config.model.base
        if row is not None and row.base_model != base:
            why = f"it was trained on {row.base_model}, and model.base is {base}"
            raise ServeError(attempted, why, hint)

    async def rollback(self, to: str | None = None) -> tuple[str | None, SwapReport]:
        """Go back at once: to the adapter that served before, or to `to` ("base": the base model).

        Raises RollbackError when not every replica followed; what did stays there. Raises ServeError.
        """
        async with self._replicas(WAIT_SECONDS) as servers:
            # Not before: whoever held the lock may have deployed what is to be taken back.
            target = await self._way_back(to)
            attempted = f"roll {self._alias} back to {target}"
            row = await self._checked(target, attempted)
            hint = f"`flywheel deploy {target}` proves first whether it can be served; `--to base` needs no proof."
            self._check_base(row, attempted, hint)
            number = await self._request(target, "rollback")
            try:
                report = await rollback(servers, self._alias, _ref(row), self._config.serving)
            except RollbackError as error:
                # What went back stays there: once written down, reconciling takes the others along.
                if any(not replica.error for replica in error.report.replicas):
                    await self._activate(number, error.report)
                else:
                    await self._fail(number, error)
                raise
            except BaseException as error:
                await self._fail(number, error)
                raise
            await self._activate(number, report)
        return target, report

    async def _way_back(self, to: str | None) -> str | None:
        active = await self._store.read(deployments.active, self._alias)
        if to is None:
            if active is None:
                raise ServeError(
                    f"roll {self._alias} back",
                    "nothing was deployed yet",
                    "The base model is answering; there is no way back.",
                )
            return str(active.previous) if active.previous else None
        if to == "base":
            return None
        known = await self._store.read(rounds.adapter, to)
        if known is not None and not await self._store.read(deployments.has_served, self._alias, to):
            raise ServeError(
                f"roll {self._alias} back to {to}",
                f"{to} has never served",
                f"Use `flywheel deploy {to}`, which proves it first.",
            )
        return to

    async def reconcile(self) -> SwapReport:
        """Bring servers that forgot the active adapter (a restart) back to it, and unload versions long out of use.

        What was found on each is written down for `status`. Where nothing was ever deployed they are only looked at:
        what they serve may be another state's. Raises LockedError while somebody else moves the alias, and ServeError
        when they cannot be asked at all.
        """
        try:
            return await self._reconcile()
        except ServeError as error:  # the key is not set, or cannot be one
            urls = self._config.serving.urls
            report = SwapReport(self._alias, "", tuple(ReplicaReport.failed(url, error) for url in urls))
            await self._store.write(_noted, report)
            raise

    async def _reconcile(self) -> SwapReport:
        async with self._replicas(0) as servers:
            active = await self._store.read(deployments.active, self._alias)
            if active is None and not await self._store.read(deployments.history, self._alias, 1):
                report = await look(servers, self._alias)
                await self._store.write(_noted, report)
                return report
            # A first swap that died half done leaves nothing active and may have moved aliases: to the base model.
            adapter = active.adapter if active is not None else None
            row = await self._store.read(rounds.adapter, adapter) if adapter else None
            probe = Probe.model_validate(row.probe) if row is not None and row.probe else None

            async def check() -> None:
                attempted = f"load adapter {adapter} again"
                hint = "Serve that one again, or let this one answer: `flywheel deploy base`."
                self._check_base(await self._checked(adapter, attempted), attempted, hint)

            serving = self._config.serving
            report = await reconcile(servers, self._alias, _ref(row), probe, serving, check, self._proven)
            await self._store.write(_noted, report)
            if not report.errors:
                drain = self._config.serving.drain_seconds
                keep = await self._store.read(deployments.in_use, self._alias, drain)
                # Those that served until a moment ago are among `keep`: there is nothing to wait for here.
                at_once = self._config.serving.model_copy(update={"drain_seconds": 0})
                await retire(servers, self._alias, keep, at_once)
            return report


def _activated(conn: Connection, number: int, report: SwapReport) -> None:
    deployments.activate(conn, number, report.alias, report.as_json())
    _noted(conn, report)


def _failed(conn: Connection, number: int, error: BaseException) -> None:
    why = str(error) if isinstance(error, FlywheelError) else f"stopped: {type(error).__name__}"
    deployments.fail(conn, number, why)
    if isinstance(error, RollbackError):
        _noted(conn, error.report)


def _noted(conn: Connection, report: SwapReport) -> None:
    found = [deployments.Sighting(each.url, each.condition, each.serves, each.error) for each in report.replicas]
    deployments.note_replicas(conn, report.alias, found)


def _ref(row: Row[Any] | None) -> AdapterRef | None:
    return AdapterRef(name=row.name, path=row.path, sha256=row.sha256) if row is not None else None


def _hash_of(path: Path) -> tuple[str, str]:
    """The hash of an adapter's files; empty where there is none, and why."""
    try:
        if not path.is_dir():
            return "", f"its directory {path} is not there"
        if why := unsafe_weights(path):
            return "", why
        return tree_sha256(path), ""
    except OSError as error:
        return "", f"{error.filename or path} cannot be read: {error.strerror or error}"
