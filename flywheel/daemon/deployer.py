"""Deployment: swaps of the alias with their records, rollback, and reconciliation of the inference servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
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
RECONCILE_WAIT_SECONDS = 1.0
"""How long a reconciliation waits for another holder of the swap lock, which is brief where no swap is running."""
AB_TEST_SLOTS = 3
"""Slots that a swap needs during an A/B test: for both versions and the next one."""
GRACE_SECONDS = 0.3
"""How long a rollback waits until the process that swaps has taken its swap back."""
NO_PROBE = "its round stored no probe for the weight check"


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

    async def _alone(self, wait_seconds: float, work: Callable[[list[Replica], Fence], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, with the inference servers, while this process holds the swap lock. A rollback that
        is asked for from now on cancels it, and closes the fence.

        Raises RolledBackError, also for what failed because of the rollback; LockedError; ServeError.
        """
        keys, last = self._keys(), await self._store.read(deployments.newest_rollback)
        fence = partial(self._store.read, _check_not_rolled_back, last, self._alias)
        async with self._lock(wait_seconds), self._clients(keys) as servers:
            working = asyncio.ensure_future(work(servers, fence))
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

    def _lock(self, wait_seconds: float) -> AbstractAsyncContextManager[int | None]:
        """The swap lock; how many swaps and rollbacks have failed, as dead processes left them."""
        end_unfinished = partial(self._store.write, deployments.fail_unfinished, "its process died")
        return swap_lock(self._config.state_dir, wait_seconds, begin=end_unfinished)

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

    async def recover(self) -> int:
        """Mark the unfinished swaps of dead processes as failed; returns how many. A running swap is left alone."""
        with contextlib.suppress(LockedError):
            async with self._lock(0) as ended:
                return ended or 0
        return 0

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
            raise ServeError(
                attempted, why or NO_PROBE, "Deploy another adapter. A rollback to this one needs no weight check."
            )
        probe = _probe(row, attempted)

        async def deployed(found: list[Replica], fence: Fence) -> SwapReport:
            # Inside the lock: its last holder may have deployed something else.
            active = await self._store.read(deployments.active, self._alias)
            serves = active.adapter if active is not None else None
            if not isinstance(instead_of, EllipsisType) and serves not in (adapter, instead_of):
                raise ServeError(attempted, rounds.other_serves(instead_of, serves))
            # Before the request is recorded: an unreachable server leaves no row for each attempt.
            servers = await ask(found, self._alias, self._has_left)
            if ab_test is not None and serves == adapter:
                raise ServeError(attempted, "it serves already, and an A/B test needs two different versions")
            recorded = {"other": serves, **asdict(ab_test)} if ab_test is not None else None
            other = await self._store.read(_other, recorded)
            await self._make_room(servers, adapter, fence)
            await fence()
            urls = [each.url for each in servers]
            number = await self._store.write(deployments.request, self._alias, urls, adapter, reason, recorded)

            async def check(lost: AdapterRef) -> None:
                if lost.name != adapter:
                    await self._check_again(lost)

            async def on_state(state: DeploymentState, report: SwapReport | None = None) -> None:
                if state in (DeploymentState.LOADING, DeploymentState.PROBING):
                    await self._store.write(deployments.advance, number, state)
                elif state is DeploymentState.ACTIVE and report is not None:
                    await self._activate(number, report)

            async with self._failing(number):
                ref, left = _ref(row), self._has_left
                return await swap(servers, self._alias, ref, probe, on_state, other, check, fence, left)

        report = await self._alone(WAIT_SECONDS, deployed)
        await self._publish()
        return report

    async def end_ab_test(self, reason: str) -> SwapReport | None:
        """Let the deployed version answer everything; None if the alias is in none.

        Raises ServeError. If it names replicas that did not follow, the others have, and `reconcile` brings these.
        """

        async def ended(servers: list[Replica], fence: Fence) -> SwapReport | None:
            active = await self._store.read(deployments.active, self._alias)
            if active is None or active.ab_test is None:
                return None
            ref = await self._store.read(rounds.adapter_ref, active.adapter)
            try:
                report = await rollback(servers, self._alias, ref, fence=fence)
            except RollbackError as error:
                if error.report.any_followed:
                    await self._store.write(_end_ab_test, active.id, error.report, reason)
                attempted = f"end the A/B test of {self._alias} on every replica"
                raise ServeError(attempted, error.why, error.hint, retryable=True) from error
            await self._store.write(_end_ab_test, active.id, report, reason)
            return report

        return await self._alone(WAIT_SECONDS, ended)

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
        from flywheel.daemon.publishing import deployed_target, publish
        from flywheel.serving.server.vllm_command import base_name

        found = await self._store.read(deployed_target, self._alias, base_name(self._config.model.base))
        if found is None:
            return
        try:
            if await asyncio.to_thread(publish, folder, self._alias, *found):
                log.info("%s is published in %s", found[0].name, folder)
            self._unpublished = ""
        except (OSError, ValueError) as error:
            if str(error) != self._unpublished:
                log.warning("%s is not published in %s: %s", found[0].name, folder, error)
            self._unpublished = str(error)

    @contextlib.asynccontextmanager
    async def _failing(self, number: int) -> AsyncIterator[None]:
        """Record that a swap or a rollback has failed, if it has. One that a replica followed counts as done:
        `reconcile` brings the others there."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, RollbackError) and error.report.any_followed:
                await self._activate(number, error.report)
            else:
                await asyncio.shield(self._store.write(_failed, number, error))
            raise

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

    async def _check_again(self, lost: AdapterRef) -> None:
        """Raises ServeError when an adapter that was deployed must not be loaded again."""
        attempted = f"load adapter {lost.name} again"
        hint = "Serve that base model again, or serve this one without an adapter: `flywheel deploy base`."
        self._check_base(await self._checked(lost.name, attempted), attempted, hint)

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
        keys = self._keys()
        lock = swap_lock(self._config.state_dir, GRACE_SECONDS, take_over=True)
        async with rollback_lock(self._config.state_dir, GRACE_SECONDS):
            number, ref = await self._store.write(self._begin_rollback, to, why)
            target = ref.name if ref is not None else None
            async with lock, self._clients(keys) as servers:
                async with self._failing(number):
                    fence = partial(self._store.read, deployments.check_unfinished, number)
                    if to is not None:  # The one before is still loaded, and no server that hangs delays the others.
                        await self._make_room(servers, target, fence)
                    # The files of a version that is still loaded are not needed.
                    report = await rollback(servers, self._alias, ref, self._check_again, fence)
                await self._activate(number, report)
        return target, report

    async def roll_servers_back(self, to: str | None = None) -> None:
        """Go back on the servers alone, while the state can be read and not be written: `rollback` must follow.
        Raises nothing for a server that does not follow."""
        ref = await self._store.read(self._rollback_adapter, to)
        async with self._clients(self._keys()) as servers:
            with contextlib.suppress(RollbackError):
                await rollback(servers, self._alias, ref)

    def _begin_rollback(self, conn: Connection, to: str | None, why: str) -> tuple[int, AdapterRef | None]:
        """Record the rollback, which ends a swap in progress; its number, and the adapter. Raises ServeError."""
        ref = self._rollback_adapter(conn, to)
        target = ref.name if ref is not None else None
        return deployments.request_rollback(conn, self._alias, self._config.serving.urls, target, why), ref

    def _rollback_adapter(self, conn: Connection, to: str | None) -> AdapterRef | None:
        """The adapter to go back to; None for the base model. Raises ServeError."""
        active = deployments.active(conn, self._alias)
        if to is None and active is None:
            why = "nothing was deployed yet"
            raise ServeError(f"roll {self._alias} back", why, "The base model serves already.")
        target = to if to is not None else active.previous if active is not None else None
        if target in (None, "base"):
            return None
        attempted, row = f"roll {self._alias} back to {target}", rounds.adapter(conn, target)
        if row is None:
            raise _unknown(attempted)
        if not deployments.has_served(conn, self._alias, target):
            raise ServeError(
                attempted,
                f"{target} has never served",
                f"Use `flywheel deploy {target}`, which checks its weights first.",
            )
        hint = f"`flywheel deploy {target}` checks its weights first; `--to base` needs no check."
        self._check_base(row, attempted, hint)
        return _ref(row)

    async def reconcile(self) -> SwapReport:
        """Load the active adapter, and the other one of an A/B test, on servers that lost it (a restart), and unload
        versions out of use.

        Records the condition of each server for `status`. Where nothing was ever deployed, the servers are only
        inspected: they may belong to another state. Raises LockedError while another process moves the alias, and
        ServeError when no request can be made.
        """
        try:
            report = await self._alone(RECONCILE_WAIT_SECONDS, self._reconcile)
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
        adapter, ab_test = (active.adapter, active.ab_test) if active is not None else (None, None)
        row = await self._store.read(rounds.adapter, adapter) if adapter else None
        ref, probe = _ref(row), _probe(row, f"prove adapter {adapter}")
        other = await self._store.read(_other, ab_test)
        before = await self._store.read(deployments.replica_states, self._alias)
        check, proven = self._check_again, self._proven
        report = await reconcile(servers, self._alias, ref, probe, check, proven, other, fence)
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


def _other(conn: Connection, ab_test: Mapping[str, Any] | None) -> OtherVersion | None:
    """The other version of a recorded A/B test. Raises ServeError."""
    if ab_test is None:
        return None
    row = rounds.adapter(conn, ab_test["other"]) if ab_test["other"] else None
    probe = _probe(row, f"prove adapter {ab_test['other']}")
    return OtherVersion(_ref(row), probe, ab_test["share"], ab_test["salt"])


def _probe(row: Row[Any] | None, attempted: str) -> Probe | None:
    """Raises ServeError for a probe that this version does not read."""
    try:
        return Probe.model_validate(row.probe) if row is not None and row.probe else None
    except ValidationError:
        raise ServeError(attempted, NO_PROBE, "Deploy another adapter, or `base`.") from None
