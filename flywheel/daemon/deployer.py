"""Deployment: swaps of the alias with their records, rollback, and reconciliation of the inference servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection, Row

from flywheel.config.file import Config
from flywheel.errors import FlywheelError, LockedError, ServeError
from flywheel.records.round import AdapterRef, Probe
from flywheel.records.states import AdapterState, DeploymentState
from flywheel.serving.adapter_files import why_changed, why_unloadable
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.client.adapter_swap import (
    Fence,
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
    version_name,
)
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.replica_addresses import has_left, replica_urls
from flywheel.serving.server_keys import admin_key
from flywheel.store import deployments, rounds
from flywheel.store.deployments import ReplicaState
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.lock import LOOK_SECONDS, rollback_lock, swap_lock

T = TypeVar("T")
log = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
"""How long a swap waits for another swap to end."""
AB_TEST_SLOTS = 3
"""Slots that a swap needs during an A/B test: for both versions and the next one."""
GRACE_SECONDS = 0.3
"""How long a rollback waits until the process that swaps has taken its swap back."""
NO_PROBE = "its round left no probe that could prove it"


@dataclass(frozen=True, slots=True)
class ABTestRequest:
    """That the new version answers a `share` of the units only, by `salt` (see `ABTest`), and the version that serves
    now the others."""

    share: float
    salt: str


class RolledBackError(ServeError):
    """A rollback has ended a swap."""


class Deployer:
    """Points the alias at adapters, that of one target if there are `targets`. Several processes may have one; the
    swap lock orders their work. A rollback does not wait for it: it ends the swaps of others, in the state first. The
    process that swaps looks for that, and takes its swap back."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._alias = config.model.alias
        self._proven: dict[tuple[str, str], str] = {}
        self._others: dict[str, Deployer] = {}
        self._unpublished = ""

    def of(self, config: Config) -> Deployer:
        """The deployer of the target whose settings these are (`Config.by_target`), the same one each time."""
        if config.target == self._config.target:
            return self
        return self._others.setdefault(config.target, Deployer(self._store, config))

    @contextlib.asynccontextmanager
    async def _replicas(self, wait_seconds: float) -> AsyncIterator[tuple[list[Replica], int]]:
        """The inference servers, while this process holds the swap lock, and the number of the last rollback."""
        keys = self._keys()
        last = 0

        async def begin() -> None:
            nonlocal last
            last = await self._store.write(_begun)

        lock = swap_lock(self._config.state_dir, wait_seconds, begin=begin)
        async with lock, self._clients(keys) as servers:
            yield servers, last

    def _keys(self) -> dict[str, str | None]:
        """The admin key by entry of `serving.urls`."""
        return {entry: admin_key(self._config, entry, f"ask {entry}") for entry in self._config.serving.urls}

    @contextlib.asynccontextmanager
    async def _clients(self, keys: Mapping[str, str | None]) -> AsyncIterator[list[Replica]]:
        serving = self._config.serving
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    Replica(url, keys[entry], timeout_seconds=serving.load_timeout_seconds)
                )
                for url, entry in (await replica_urls(serving)).items()
            ]

    async def _unless_rolled_back(self, last: int, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when a rollback is asked for after the one of number `last`.

        Raises RolledBackError, also for what failed because of the rollback.
        """
        working = asyncio.ensure_future(work)
        fence = self._fence(last)
        try:
            while not (await asyncio.wait((working,), timeout=LOOK_SECONDS))[0]:
                await fence()
        except BaseException:
            working.cancel()
            await asyncio.wait((working,))
            if working.cancelled() or working.exception() is not None:
                raise  # else it was recorded before
        if not working.cancelled() and working.exception() is not None:
            await fence()
        return working.result()

    def _fence(self, last: int) -> Fence:
        return partial(self._store.read, _check_not_rolled_back, last, self._alias)

    async def recover(self) -> int:
        """Mark the unfinished swaps of dead processes as failed; returns how many. A running swap is left alone."""
        ended = 0

        async def end_unfinished() -> None:
            nonlocal ended
            ended = await self._store.write(deployments.fail_unfinished, "its process died")

        with contextlib.suppress(LockedError):
            async with swap_lock(self._config.state_dir, 0, begin=end_unfinished):
                pass
        return ended

    async def deploy(
        self,
        adapter: str | None,
        reason: str,
        ab_test: ABTestRequest | None = None,
        *,
        instead_of: str | EllipsisType | None = ...,
    ) -> SwapReport:
        """Swap to `adapter` (None: the base model), if it is given only from `instead_of`, and with `ab_test` for a
        share of the units. Raises ServeError; then the previous version still serves."""
        attempted = f"deploy adapter {adapter}"
        row = await self._checked(adapter, attempted)
        if row is not None and not row.probe:
            why = await self._store.read(rounds.why_unprovable, row.id)
            raise ServeError(attempted, why or NO_PROBE, "Deploy another adapter. A rollback to it needs no proof.")
        probe = _probe(row, attempted)
        last = await self._store.read(deployments.newest_rollback)

        async def deployed(found: list[Replica]) -> SwapReport:
            # Inside the lock: its last holder may have deployed something else.
            active = await self._store.read(deployments.active, self._alias)
            serves = active.adapter if active is not None else None
            if not isinstance(instead_of, EllipsisType) and serves not in (adapter, instead_of):
                raise ServeError(attempted, rounds.other_serves(instead_of, serves))
            # Before the request is recorded: an unreachable server leaves no row for each attempt.
            servers = await ask(found, self._alias, self._has_left)
            if ab_test is not None and serves == adapter:
                raise ServeError(attempted, "it serves already, and an alias has an A/B test between two versions")
            recorded = {"other": serves, **asdict(ab_test)} if ab_test is not None else None
            other = await self._other(recorded)
            await self._make_room(servers, adapter, self._fence(last))
            urls = [each.url for each in servers]
            number = await self._store.write(_requested, last, self._alias, urls, adapter, reason, recorded)

            async def check(lost: AdapterRef) -> None:
                if lost.name != adapter:
                    await self._checked(lost.name, f"load adapter {lost.name} again")

            async def on_state(state: DeploymentState, report: SwapReport | None = None) -> None:
                if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                    await self._store.write(deployments.advance, number, state)
                elif state is DeploymentState.ACTIVE and report is not None:
                    await self._activate(number, report)

            try:
                fence, left = self._fence(last), self._has_left
                return await swap(servers, self._alias, _ref(row), probe, on_state, other, check, fence, left)
            except BaseException as error:
                await self._fail(number, error)
                raise

        async with self._replicas(WAIT_SECONDS) as (servers, _):
            report = await self._unless_rolled_back(last, deployed(servers))
        await self._publish()
        return report

    async def end_ab_test(self, reason: str) -> SwapReport | None:
        """Let the deployed version answer everything; None if the alias is in none.

        Raises ServeError. If it names replicas that did not follow, the others have, and `reconcile` brings these.
        """
        last = await self._store.read(deployments.newest_rollback)

        async def ended(servers: list[Replica]) -> SwapReport | None:
            active = await self._store.read(deployments.active, self._alias)
            if active is None or active.ab_test is None:
                return None
            try:
                ref = await self._store.read(rounds.adapter_ref, active.adapter)
                report = await rollback(servers, self._alias, ref, fence=self._fence(last))
            except RollbackError as error:
                if any(not replica.error for replica in error.report.replicas):
                    await self._store.write(_end_ab_test, active.id, error.report, reason)
                attempted = f"end the A/B test of {self._alias} on every replica"
                raise ServeError(attempted, error.why, error.hint, retryable=True) from error
            await self._store.write(_end_ab_test, active.id, report, reason)
            return report

        async with self._replicas(WAIT_SECONDS) as (servers, _):
            return await self._unless_rolled_back(last, ended(servers))

    async def _other(self, ab_test: dict[str, Any] | None) -> OtherVersion | None:
        """The other version of a recorded A/B test."""
        if ab_test is None:
            return None
        row = await self._store.read(rounds.adapter, ab_test["other"]) if ab_test["other"] else None
        probe = _probe(row, f"prove adapter {ab_test['other']}")
        return OtherVersion(_ref(row), probe, ab_test["share"], ab_test["salt"])

    async def _has_left(self, replica: Replica) -> bool:
        return await has_left(self._config.serving, replica.url)

    async def _make_room(self, servers: list[Replica], adapter: str | None, fence: Fence) -> None:
        if adapter is not None:
            drain = self._config.serving.drain_seconds
            active = await self._store.read(deployments.active, self._alias)
            if self._config.serving.max_loras < AB_TEST_SLOTS and active is not None and active.ab_test is not None:
                # The A/B test ends with the swap, and until then its versions would keep all slots.
                ref = await self._store.read(rounds.adapter_ref, active.adapter)
                with contextlib.suppress(RollbackError):
                    await rollback(servers, self._alias, ref, fence=fence)
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

    async def _publish(self) -> None:
        """Bring the folder of published adapters up to date, without the swap lock: its disk may be slow. What is
        wrong is logged, once; it is tried again at each reconciliation."""
        if (folder := self._config.deploy.publish) is None:
            return
        # Not at the top: a rollback needs none of it.
        from flywheel.daemon.publishing import model_card, publish
        from flywheel.serving.server.vllm_command import base_name

        active = await self._store.read(deployments.active, self._alias)
        if active is None:
            return
        base, other = base_name(self._config.model.base), await self._other(active.ab_test)
        ref = await self._store.read(rounds.adapter_ref, active.adapter)
        name = version_name(self._alias, ref.name) if ref is not None else base
        ab_test = other.ab_test(self._alias, base) if other is not None else None
        path, sha256 = (ref.path, ref.sha256) if ref is not None else (None, None)
        target = AliasTarget(name, path, sha256, ab_test)
        cards = {
            each.name: await self._store.read(model_card, self._alias, each.name.rpartition("@")[2])
            for each in target.versions
            if each.path
        }
        try:
            if await asyncio.to_thread(publish, folder, self._alias, target, cards):
                log.info("%s is published in %s", name, folder)
            self._unpublished = ""
        except (OSError, ValueError) as error:
            if str(error) != self._unpublished:
                log.warning("%s is not published in %s: %s", name, folder, error)
            self._unpublished = str(error)

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
            raise _unknown(attempted)
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

        A swap in progress is ended; it was not recorded, so the adapter before it is the one that is rolled back.
        Raises RollbackError when a replica did not follow; the others stay rolled back. Raises ServeError.
        """
        async with rollback_lock(self._config.state_dir, GRACE_SECONDS):
            return await self._rollback(to, why)

    async def _rollback(self, to: str | None, why: str) -> tuple[str | None, SwapReport]:
        keys = self._keys()
        number, row = await self._store.write(self._begin_rollback, to, why)
        target = row.name if row is not None else None
        attempted = f"roll {self._alias} back to {target}"

        async def check(_: AdapterRef) -> None:
            await self._checked(target, attempted)

        lock = swap_lock(self._config.state_dir, GRACE_SECONDS, take_over=True)
        async with lock, self._clients(keys) as servers:
            try:
                fence = partial(self._store.read, deployments.check_unfinished, number)
                if to is not None:  # The one before is still loaded, and no server that hangs delays the others.
                    await self._make_room(servers, target, fence)
                # The files of a version that is still loaded are not needed.
                report = await rollback(servers, self._alias, _ref(row), check, fence)
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

    async def roll_servers_back(self, to: str | None = None) -> None:
        """Go back on the servers alone, while the state can be read and not be written: `rollback` must follow.
        Raises nothing for a server that does not follow."""
        row = await self._store.read(self._rollback_adapter, to)
        async with self._clients(self._keys()) as servers:
            with contextlib.suppress(RollbackError):
                await rollback(servers, self._alias, _ref(row))

    def _begin_rollback(self, conn: Connection, to: str | None, why: str) -> tuple[int, Row[Any] | None]:
        """Record the rollback, which ends a swap in progress; its number, and the adapter. Raises ServeError."""
        row = self._rollback_adapter(conn, to)
        target = row.name if row is not None else None
        return deployments.request_rollback(conn, self._alias, self._config.serving.urls, target, why), row

    def _rollback_adapter(self, conn: Connection, to: str | None) -> Row[Any] | None:
        """The adapter to go back to; None for the base model. Raises ServeError."""
        target = self._rollback_target(conn, to)
        attempted = f"roll {self._alias} back to {target}"
        row = rounds.adapter(conn, target) if target is not None else None
        if target is not None and row is None:
            raise _unknown(attempted)
        hint = f"`flywheel deploy {target}` proves first whether it can be served; `--to base` needs no proof."
        self._check_base(row, attempted, hint)
        return row

    def _rollback_target(self, conn: Connection, to: str | None) -> str | None:
        active = deployments.active(conn, self._alias)
        if to is None:
            if active is None:
                raise ServeError(
                    f"roll {self._alias} back", "nothing was deployed yet", "The base model serves already."
                )
            return str(active.previous) if active.previous else None
        if to == "base":
            return None
        if rounds.adapter(conn, to) is not None and not deployments.has_served(conn, self._alias, to):
            raise ServeError(
                f"roll {self._alias} back to {to}",
                f"{to} has never served",
                f"Use `flywheel deploy {to}`, which proves it first.",
            )
        return to

    async def reconcile(self) -> SwapReport:
        """Load the active adapter, and the other one of an A/B test, on servers that lost it (a restart), and unload
        versions out of use.

        Records the condition of each server for `status`. Where nothing was ever deployed, the servers are only
        inspected: they may belong to another state. Raises LockedError while another process moves the alias, and
        ServeError when no request can be made.
        """
        try:
            async with self._replicas(0) as (servers, last):
                report = await self._unless_rolled_back(last, self._reconcile(servers, self._fence(last)))
        except RolledBackError as error:
            raise LockedError(error.attempted, error.why, error.hint, retryable=True) from None
        except ServeError as error:  # the admin key is missing or invalid
            urls = self._config.serving.urls
            report = SwapReport(self._alias, "", tuple(ReplicaReport.failed(url, error) for url in urls))
            await self._store.write(_noted, report)
            raise
        await self._publish()
        return report

    async def _reconcile(self, servers: list[Replica], fence: Fence) -> SwapReport:
        active = await self._store.read(deployments.active, self._alias)
        if active is None and not await self._store.read(deployments.history, self._alias, 1):
            report = await look(servers, self._alias)
            await self._store.write(_noted, report)
            return report
        # A first swap that died leaves nothing active and may have moved aliases: back to the base model.
        adapter = active.adapter if active is not None else None
        row = await self._store.read(rounds.adapter, adapter) if adapter else None
        probe = _probe(row, f"prove adapter {adapter}")
        other = await self._other(active.ab_test if active is not None else None)

        async def check(lost: AdapterRef) -> None:
            attempted = f"load adapter {lost.name} again"
            hint = "Serve that base model again, or serve this one without an adapter: `flywheel deploy base`."
            self._check_base(await self._checked(lost.name, attempted), attempted, hint)

        before = await self._store.read(deployments.replica_states, self._alias)
        report = await reconcile(servers, self._alias, _ref(row), probe, check, self._proven, other, fence)
        await fence()
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


def _unknown(attempted: str) -> ServeError:
    return ServeError(attempted, "there is no such adapter", "`flywheel status` lists the adapters.")


def _check_not_rolled_back(conn: Connection, last: int, alias: str) -> None:
    """Raises RolledBackError after a rollback that is newer than the one of number `last`."""
    if (newest := deployments.newest_rollback(conn)) != last and (row := deployments.by_number(conn, newest)):
        # One of another alias does not mean that this swap is unwanted.
        raise RolledBackError(
            f"move {alias}",
            f"a rollback of {row.alias} was asked for meanwhile",
            "See with `flywheel status` what serves, and deploy again if that is wanted.",
            retryable=row.alias != alias,
        )


def _begun(conn: Connection) -> int:
    """End what a dead process left: none works on a swap or a rollback now. The number of the last rollback."""
    deployments.fail_unfinished(conn, "its process died")
    return deployments.newest_rollback(conn)


def _requested(
    conn: Connection,
    last: int,
    alias: str,
    endpoints: list[str],
    adapter: str | None,
    reason: str,
    ab_test: dict[str, Any] | None,
) -> int:
    _check_not_rolled_back(conn, last, alias)
    return deployments.request(conn, alias, endpoints, adapter, reason, ab_test)


def _activated(conn: Connection, number: int, report: SwapReport, config: Config) -> None:
    deployments.activate(conn, number, report.alias, report.as_json())
    rounds.decide_passed(conn, config.target, report.alias, config.training.max_uses)
    _noted(conn, report)


def _end_ab_test(conn: Connection, number: int, report: SwapReport, reason: str) -> None:
    deployments.end_ab_test(conn, number, reason)
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
