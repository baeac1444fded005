"""Deployment: swaps of the alias with their records, rollback, and reconciliation of the inference servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Row

from flywheel.config import Config
from flywheel.errors import FlywheelError, LockedError, ServeError
from flywheel.records.round import AdapterRef, Probe
from flywheel.records.states import AdapterState, DeploymentState
from flywheel.serving.adapter_files import why_changed, why_unloadable
from flywheel.serving.client.adapter_swap import (
    OtherVersion,
    ReplicaReport,
    RollbackError,
    SwapReport,
    ask,
    look,
    make_room,
    reconcile,
    retire,
    rollback,
    swap,
)
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.server_keys import admin_key
from flywheel.store import deployments, rounds
from flywheel.store.deployments import ReplicaState
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.lock import swap_lock

log = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
"""How long a swap waits for another swap to end."""
SPLIT_SLOTS = 3
"""Slots that a swap needs while the alias is split: for both versions and the next one."""
NO_PROBE = "its round left no probe that could prove it"


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """That the new version answers a `share` of the units only, by `salt` (see `Split`), and the version that serves
    now the others."""

    share: float
    salt: str


class Deployer:
    """Points the alias at adapters, that of one target if there are `targets`. Several processes may have one; the
    swap lock orders their work."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._alias = config.model.alias
        self._proven: dict[tuple[str, str], str] = {}
        self._others: dict[str, Deployer] = {}

    def of(self, config: Config) -> Deployer:
        """The deployer of the target whose settings these are (`Config.by_target`), the same one each time."""
        if config.target == self._config.target:
            return self
        return self._others.setdefault(config.target, Deployer(self._store, config))

    @contextlib.asynccontextmanager
    async def _replicas(self, wait_seconds: float) -> AsyncIterator[list[Replica]]:
        """The inference servers, while this process holds the swap lock."""
        serving = self._config.serving
        keys = {url: admin_key(self._config, url, f"ask {url}") for url in serving.urls}
        async with swap_lock(self._config.state_dir, wait_seconds), contextlib.AsyncExitStack() as stack:
            # No process works on an unfinished swap.
            await self._store.write(deployments.fail_unfinished, "its process died")
            yield [
                await stack.enter_async_context(Replica(url, key, timeout_seconds=serving.load_timeout_seconds))
                for url, key in keys.items()
            ]

    async def recover(self) -> int:
        """Mark the unfinished swaps of dead processes as failed; returns how many. A running swap is left alone."""
        try:
            async with swap_lock(self._config.state_dir, 0):
                return await self._store.write(deployments.fail_unfinished, "its process died")
        except LockedError:
            return 0

    async def deploy(
        self,
        adapter: str | None,
        reason: str,
        split: SplitRequest | None = None,
        *,
        instead_of: str | EllipsisType | None = ...,
    ) -> SwapReport:
        """Swap to `adapter` (None: the base model), if it is given only from `instead_of`, and with `split` for a
        share of the units. Raises ServeError; then the previous version still serves."""
        attempted = f"deploy adapter {adapter}"
        row = await self._checked(adapter, attempted)
        if row is not None and not row.probe:
            raise ServeError(attempted, NO_PROBE, "Deploy another adapter.")
        probe = _probe(row, attempted)
        async with self._replicas(WAIT_SECONDS) as servers:
            if not isinstance(instead_of, EllipsisType):
                # Inside the lock: its last holder may have deployed something else.
                active = await self._store.read(deployments.active, self._alias)
                if (serves := active.adapter if active is not None else None) not in (adapter, instead_of):
                    raise ServeError(attempted, rounds.other_serves(instead_of, serves))
            # Before the request is recorded: an unreachable server leaves no row for each attempt.
            await ask(servers, self._alias)
            now = await self._store.read(deployments.active, self._alias)
            before = now.adapter if now is not None else None
            if split is not None and before == adapter:
                raise ServeError(attempted, "it serves already, and an alias is split between two versions")
            recorded = {"other": before, **asdict(split)} if split is not None else None
            other = await self._other(recorded)
            await self._make_room(servers, adapter)
            number = await self._request(adapter, reason, recorded)

            async def check(lost: AdapterRef) -> None:
                if lost.name != adapter:
                    await self._checked(lost.name, f"load adapter {lost.name} again")

            async def on_state(state: DeploymentState, report: SwapReport | None = None) -> None:
                if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                    await self._store.write(deployments.advance, number, state)
                elif state is DeploymentState.ACTIVE and report is not None:
                    await self._activate(number, report)

            try:
                report = await swap(servers, self._alias, _ref(row), probe, on_state, other, check)
            except BaseException as error:
                await self._fail(number, error)
                raise
        return report

    async def end_split(self, reason: str) -> SwapReport | None:
        """Let the deployed version answer everything; None if the alias is not split.

        Raises ServeError. If it names replicas that did not follow, the others have, and `reconcile` brings these.
        """
        async with self._replicas(WAIT_SECONDS) as servers:
            active = await self._store.read(deployments.active, self._alias)
            if active is None or active.split is None:
                return None
            try:
                report = await rollback(servers, self._alias, await self._ref(active.adapter))
            except RollbackError as error:
                if any(not replica.error for replica in error.report.replicas):
                    await self._store.write(_unsplit, active.id, error.report, reason)
                attempted = f"end the split of {self._alias} on every replica"
                raise ServeError(attempted, error.why, error.hint, retryable=True) from error
            await self._store.write(_unsplit, active.id, report, reason)
        return report

    async def _ref(self, adapter: str | None) -> AdapterRef | None:
        return _ref(await self._store.read(rounds.adapter, adapter)) if adapter else None

    async def _other(self, split: dict[str, Any] | None) -> OtherVersion | None:
        """The other version of a recorded split."""
        if split is None:
            return None
        row = await self._store.read(rounds.adapter, split["other"]) if split["other"] else None
        probe = _probe(row, f"prove adapter {split['other']}")
        return OtherVersion(_ref(row), probe, split["share"], split["salt"])

    async def _request(self, adapter: str | None, reason: str, split: dict[str, Any] | None = None) -> int:
        urls = self._config.serving.urls
        return await self._store.write(deployments.request, self._alias, urls, adapter, reason, split)

    async def _make_room(self, servers: list[Replica], adapter: str | None) -> None:
        if adapter is not None:
            drain = self._config.serving.drain_seconds
            active = await self._store.read(deployments.active, self._alias)
            if self._config.serving.max_loras < SPLIT_SLOTS and active is not None and active.split is not None:
                # The split ends with the swap, and until then its versions would keep all slots.
                with contextlib.suppress(RollbackError):
                    await rollback(servers, self._alias, await self._ref(active.adapter))
            recent = await self._store.read(deployments.in_use, self._alias, drain)
            keep = await self._store.read(deployments.in_use, self._alias, 0)
            await make_room(servers, self._alias, adapter, recent, keep, drain)

    async def _activate(self, number: int, report: SwapReport) -> None:
        writing = asyncio.ensure_future(self._store.write(_activated, number, report, self._config))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # A recorded swap has happened and must not be undone.
            await asyncio.wait([writing])
            writing.result()

    async def _fail(self, number: int, error: BaseException) -> None:
        await asyncio.shield(self._store.write(_failed, number, error))

    async def _checked(self, adapter: str | None, attempted: str) -> Row[Any] | None:
        """The adapter, after a check that its files are those that were evaluated; None for the base model.

        Raises ServeError.
        """
        if adapter is None:
            return None
        row = await self._store.read(rounds.adapter, adapter)
        if row is None:
            raise ServeError(attempted, "there is no such adapter", "`flywheel status` lists the adapters.")
        state, folder = AdapterState(row.state), Path(row.path)
        if why := await asyncio.to_thread(why_unloadable, folder, sha256=row.sha256):
            if why == why_changed(folder) and state not in (AdapterState.CORRUPT, AdapterState.REMOVED):
                await self._store.write(move, row.id, state, AdapterState.CORRUPT, "files changed")
            if state is AdapterState.REMOVED:
                why = f"the files in {row.path} were removed by retention"
            raise ServeError(
                attempted,
                why,
                "Restore them from a backup, or deploy another adapter. "
                "`flywheel rollback --to base` lets the base model answer.",
            )
        if state in (AdapterState.CORRUPT, AdapterState.REMOVED):
            await self._store.write(move, row.id, state, AdapterState.READY, "its files are complete again")
        return row

    def _check_base(self, row: Row[Any] | None, attempted: str, hint: str) -> None:
        base = self._config.model.base
        if row is not None and row.base_model != base:
            why = f"it was trained on {row.base_model}, and model.base is {base}"
            raise ServeError(attempted, why, hint)

    async def rollback(self, to: str | None = None, why: str = "") -> tuple[str | None, SwapReport]:
        """Go back to the adapter that served before, or to `to` ("base": the base model), without a proof; `why` is
        recorded.

        Raises RollbackError when a replica did not follow; the others stay rolled back. Raises ServeError.
        """
        async with self._replicas(WAIT_SECONDS) as servers:
            # Inside the lock: its last holder may have deployed the adapter that is rolled back now.
            target = await self._rollback_target(to)
            attempted = f"roll {self._alias} back to {target}"
            row = await self._checked(target, attempted)
            hint = f"`flywheel deploy {target}` proves first whether it can be served; `--to base` needs no proof."
            self._check_base(row, attempted, hint)
            if to is not None:  # The one before is still loaded, and no server that hangs delays the others.
                await self._make_room(servers, target)
            reason = f"{deployments.ROLLBACK}: {why}" if why else deployments.ROLLBACK
            number = await self._request(target, reason)
            try:
                report = await rollback(servers, self._alias, _ref(row))
            except RollbackError as error:
                # Once recorded, `reconcile` rolls the other replicas back too.
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

    async def _rollback_target(self, to: str | None) -> str | None:
        active = await self._store.read(deployments.active, self._alias)
        if to is None:
            if active is None:
                raise ServeError(
                    f"roll {self._alias} back", "nothing was deployed yet", "The base model serves already."
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
        """Load the active adapter, and the other one of a split, on servers that lost it (a restart), and unload
        versions out of use.

        Records the condition of each server for `status`. Where nothing was ever deployed, the servers are only
        inspected: they may belong to another state. Raises LockedError while another process moves the alias, and
        ServeError when no request can be made.
        """
        try:
            return await self._reconcile()
        except ServeError as error:  # the admin key is missing or invalid
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
            # A first swap that died leaves nothing active and may have moved aliases: back to the base model.
            adapter = active.adapter if active is not None else None
            row = await self._store.read(rounds.adapter, adapter) if adapter else None
            probe = _probe(row, f"prove adapter {adapter}")
            other = await self._other(active.split if active is not None else None)

            async def check(lost: AdapterRef) -> None:
                attempted = f"load adapter {lost.name} again"
                hint = "Serve that base model again, or serve this one without an adapter: `flywheel deploy base`."
                self._check_base(await self._checked(lost.name, attempted), attempted, hint)

            before = await self._store.read(deployments.replica_states, self._alias)
            report = await reconcile(servers, self._alias, _ref(row), probe, check, self._proven, other)
            await self._store.write(_noted, report)
            for each in report.changed:
                last = before.get(each.url)
                is_lost = report.target and report.target in (
                    each.previous,
                    last.serves if last is not None else None,
                )
                how = "had lost the deployed adapter" if is_lost else f"answered with {each.previous or 'nothing'}"
                log.info("%s %s: %s is %s there now", each.url, how, self._alias, each.serves)
            if not report.errors:
                drain = self._config.serving.drain_seconds
                keep = await self._store.read(deployments.in_use, self._alias, drain)
                # Adapters that served until recently are in `keep`: no drain is needed.
                await retire(servers, self._alias, keep, 0)
            return report


def _activated(conn: Connection, number: int, report: SwapReport, config: Config) -> None:
    deployments.activate(conn, number, report.alias, report.as_json())
    rounds.decide_passed(conn, config.target, report.alias, config.training.max_uses)
    _noted(conn, report)


def _unsplit(conn: Connection, number: int, report: SwapReport, reason: str) -> None:
    deployments.end_split(conn, number, reason)
    _noted(conn, report)


def _failed(conn: Connection, number: int, error: BaseException) -> None:
    why = str(error) if isinstance(error, FlywheelError) else f"stopped: {type(error).__name__}"
    deployments.fail(conn, number, why)
    if isinstance(error, RollbackError):
        _noted(conn, error.report)


def _noted(conn: Connection, report: SwapReport) -> None:
    states = {each.url: ReplicaState(each.condition, each.serves, each.error) for each in report.replicas}
    deployments.note_replicas(conn, report.alias, states)


def _ref(row: Row[Any] | None) -> AdapterRef | None:
    return AdapterRef(name=row.name, path=row.path, sha256=row.sha256) if row is not None else None


def _probe(row: Row[Any] | None, attempted: str) -> Probe | None:
    """Raises ServeError for a probe that this version does not read."""
    try:
        return Probe.model_validate(row.probe) if row is not None and row.probe else None
    except ValidationError:
        raise ServeError(attempted, NO_PROBE, "Deploy another adapter, or `base`.") from None
