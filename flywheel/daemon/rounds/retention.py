"""Retention: removes what nothing needs any more, the large files of old rounds and old calls of the call logs.

A round's specification and measurements stay. An adapter that a server still lists stays too: the server may read it
again. Several processes may remove at a time; the swap lock and the database order their work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Row

from flywheel.config.file import Config
from flywheel.daemon.rounds.removal import leftovers, remove_leftovers, set_aside, size_of_leftovers
from flywheel.errors import LockedError, ServeError, StoreError
from flywheel.serving.calls.call_log import CallLog, call_logs
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.replica_addresses import replica_urls
from flywheel.serving.server_keys import admin_key
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from flywheel.system.lock import swap_lock

log = logging.getLogger(__name__)


class RemovedRound(msgspec.Struct, frozen=True):
    """A round whose files were removed, or would be: so many `bytes`."""

    round: str
    state: str
    finished_at: str
    bytes: int
    dir: str

    @classmethod
    def of(cls, row: Row[Any], size: int) -> RemovedRound:
        return cls(row.name, row.state, row.finished_at, size, row.dir)


class KeptRound(msgspec.Struct, frozen=True):
    """A round that is old enough and whose files are needed."""

    round: str
    why: str


class PrunedLog(msgspec.Struct, frozen=True):
    """`calls` were removed (or are too old, in a dry run), `size` bytes are in use, `above` of them too many."""

    path: str
    calls: int
    size: int
    above: int


class Pruned(msgspec.Struct):
    """What was removed, or would be in a dry run."""

    removed: list[RemovedRound] = []
    kept: list[KeptRound] = []
    bytes: int = 0
    call_logs: list[PrunedLog] = []
    dry_run: bool = False


async def remove_old(
    store: Store, config: Config, keep_days: float, why: str, *, dry_run: bool = False, wait_seconds: float = 0.0
) -> Pruned:
    """Remove unneeded files of rounds that ended more than `keep_days` ago, and finish earlier removals.

    Raises LockedError while the alias is moved, and StoreError for a file that cannot be removed, after the other
    rounds.
    """
    if dry_run:
        due, kept = await _due(store, config, keep_days)
        removed = [RemovedRound.of(each, await asyncio.to_thread(size_of_leftovers, Path(each.dir))) for each in due]
        return Pruned(removed, kept, sum(each.bytes for each in removed), dry_run=True)
    removed, trouble = [], []
    async with swap_lock(config.state_dir, wait_seconds):
        due, kept = await _due(store, config, keep_days)
        names = [each.name for each in due]
        await store.write(rounds.begin, names, keep_days, config.retention.keep_served, why)
        going = await store.read(rounds.begun)
        for each in going:
            try:
                await asyncio.to_thread(set_aside, Path(each.dir))
            except StoreError as error:
                trouble.append(error)
    # The adapters are renamed: no swap can load them, so the slow removal needs no lock.
    for each in going:
        try:
            size = await asyncio.to_thread(remove_leftovers, Path(each.dir))
        except StoreError as error:
            trouble.append(error)
            continue
        await store.write(rounds.end, each.id, each.state, size)
        removed.append(RemovedRound.of(each, size))
    if trouble:
        raise trouble[-1]
    return Pruned(removed, kept, sum(each.bytes for each in removed))


async def remove_regularly(store: Store, config: Config) -> None:
    """The daemon's periodic removal of rounds. Raises StoreError."""
    if (days := config.retention.keep_days) is None:
        return
    try:
        done = await remove_old(store, config, days, f"retention.keep_days is {days:g}")
    except LockedError:
        return  # a swap is running
    if done.removed:
        names = ", ".join(each.round for each in done.removed)
        log.info("the files of %s were removed: %d bytes", names, done.bytes)


def prune_call_logs(config: Config, *, dry_run: bool) -> list[PrunedLog]:
    """Apply `serving.call_log` to the servers' logs and the daemon's copy of them. Nothing is removed if it is false.
    Raises CallLogError."""
    if (settings := config.serving.call_log) is None:
        return []
    before_ns, max_bytes = time.time_ns() - settings.keep_ns, settings.max_bytes
    done = []
    for path in call_logs(config.state_dir):
        with CallLog(path) as call_log:
            calls = call_log.older(before_ns) if dry_run else call_log.prune(before_ns, max_bytes)
            size = call_log.live_bytes()
        done.append(PrunedLog(str(path), calls, size, max(0, size - max_bytes)))
    return done


async def _due(store: Store, config: Config, keep_days: float) -> tuple[list[Row[Any]], list[KeptRound]]:
    """The old rounds whose files may be removed, and those whose files stay. Rounds without files are skipped."""
    found = await store.read(rounds.old, keep_days, config.retention.keep_served)
    found = [(each, why) for each, why in found if await asyncio.to_thread(leftovers, Path(each.dir))]
    if any(each.requested and not why for each, why in found):
        found = await _without_listed(config, found)
    return [each for each, why in found if not why], [KeptRound(each.name, why) for each, why in found if why]


async def _without_listed(config: Config, found: Sequence[tuple[Row[Any], str]]) -> list[tuple[Row[Any], str]]:
    listed: dict[str, str] = {}
    trouble = ""
    for url, entry in (await replica_urls(config.serving)).items():
        try:
            async with Replica(url, admin_key(config, entry, f"ask {url}")) as replica:
                listed |= dict.fromkeys((await replica.models()).values(), f"{url} still lists it")
        except ServeError as error:
            trouble = f"{url} does not say whether it still lists it: {error.why}"
    return [(each, why or listed.get(each.adapter, trouble) if each.requested else why) for each, why in found]
