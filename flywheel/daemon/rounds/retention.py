"""Retention: removes what nothing needs any more, the large files of old rounds and old calls of the call logs.

A round's specification and measurements stay. An adapter that a server still lists stays too: the server may read it
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Row

from flywheel.config.file import Config
from flywheel.errors import LockedError, ServeError, StoreError
from flywheel.records.round import ADAPTER_DIR, ERROR_FILE, METRICS_FILE, RESULT_FILE, SELECTION_FILE, SPEC_FILE
from flywheel.serving.calls.call_log import CallLog, call_log_copy_path
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.replica_addresses import replica_urls
from flywheel.serving.server_keys import admin_key
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from flywheel.system.files import write_json
from flywheel.system.lock import swap_lock

log = logging.getLogger(__name__)
STAYS: Final = frozenset({SPEC_FILE, METRICS_FILE, RESULT_FILE, ERROR_FILE, SELECTION_FILE})
"""Specification (without its tasks, which are in the state), measurements and result of a round."""
WITHOUT_TASKS: Final[Mapping[str, object]] = {"train": [], "held_out": [], "suites": [], "pool": None}
ASIDE: Final = f".{ADAPTER_DIR}.removed"
"""An adapter that is being removed."""


@dataclass(frozen=True, slots=True)
class PrunedLog:
    """`calls` were removed (or are too old, in a dry run), `size` bytes are in use, `above` of them too many."""

    path: Path
    calls: int
    size: int
    above: int


def prune_call_logs(config: Config, *, dry_run: bool) -> list[PrunedLog]:
    """Apply `serving.call_log` to the servers' logs and the daemon's copy of them. Nothing is removed if it is false.
    Raises CallLogError."""
    settings = config.serving.call_log
    if settings is None:
        return []
    before_ns, max_bytes = time.time_ns() - settings.keep_ns, settings.max_bytes
    paths = [*sorted((config.state_dir / "serving").glob("calls-*.db")), call_log_copy_path(config.state_dir)]
    done = []
    for path in paths:
        if path.is_file():
            with CallLog(path) as log:
                calls = log.older(before_ns) if dry_run else log.prune(before_ns, max_bytes)
                size = log.live_bytes()
            done.append(PrunedLog(path, calls, size, max(0, size - max_bytes)))
    return done


@dataclass(frozen=True, slots=True)
class Removal:
    """Removed (or removable) rounds with their bytes, and rounds that are old enough but needed, with the reason."""

    removed: tuple[tuple[Row[Any], int], ...] = ()
    kept: tuple[tuple[Row[Any], str], ...] = ()

    @property
    def size(self) -> int:
        return sum(size for _, size in self.removed)


class Retention:
    """Removes files of old rounds. Several processes may run it; the swap lock and the database order their work."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config

    async def prune(self) -> None:
        """The daemon's periodic removal. Raises StoreError."""
        days = self._config.retention.keep_days
        try:
            done = await self.remove(days, f"retention.keep_days is {days:g}") if days is not None else Removal()
        except LockedError:
            return  # a swap is running
        if done.removed:
            names = ", ".join(each.name for each, _ in done.removed)
            log.info("the files of %s were removed: %d bytes", names, done.size)

    async def look(self, keep_days: float) -> Removal:
        """The removal that `remove` would make."""
        may_go, kept = await self._due(keep_days)
        sizes = [(each, await asyncio.to_thread(_size, Path(each.dir))) for each in may_go]
        return Removal(tuple(sizes), kept)

    async def remove(self, keep_days: float, why: str, *, wait_seconds: float = 0.0) -> Removal:
        """Remove unneeded files of rounds that ended more than `keep_days` ago, and finish earlier removals.

        Raises LockedError while the alias is moved, and StoreError for a file that cannot be removed, after the other
        rounds.
        """
        keep_served = self._config.retention.keep_served
        async with swap_lock(self._config.state_dir, wait_seconds):
            may_go, kept = await self._due(keep_days)
            names = [each.name for each in may_go]
            await self._store.write(rounds.begin, names, keep_days, keep_served, why)
            going = await self._store.read(rounds.begun)
            trouble = []
            for each in going:
                try:
                    await asyncio.to_thread(_set_aside, Path(each.dir))
                except StoreError as error:
                    trouble.append(error)
        # The adapters are renamed: no swap can load them, so the slow removal needs no lock.
        removed = []
        for each in going:
            try:
                size = await asyncio.to_thread(_remove, Path(each.dir))
            except StoreError as error:
                trouble.append(error)
                continue
            await self._store.write(rounds.end, each.id, each.state, size)
            removed.append((each, size))
        if trouble:
            raise trouble[-1]
        return Removal(tuple(removed), kept)

    async def _due(self, keep_days: float) -> tuple[list[Row[Any]], tuple[tuple[Row[Any], str], ...]]:
        """The old rounds whose files may be removed, and those whose files stay. Rounds without files are skipped."""
        found = await self._store.read(rounds.old, keep_days, self._config.retention.keep_served)
        found = [(each, why) for each, why in found if await asyncio.to_thread(_leftovers, Path(each.dir))]
        if any(each.requested and not why for each, why in found):
            found = await self._without_listed(found)
        return [each for each, why in found if not why], tuple((each, why) for each, why in found if why)

    async def _without_listed(self, found: Sequence[tuple[Row[Any], str]]) -> list[tuple[Row[Any], str]]:
        listed: dict[str, str] = {}
        trouble = ""
        for url, entry in (await replica_urls(self._config.serving)).items():
            try:
                async with Replica(url, admin_key(self._config, entry, f"ask {url}")) as replica:
                    listed |= dict.fromkeys((await replica.models()).values(), f"{url} still lists it")
            except ServeError as error:
                trouble = f"{url} cannot be asked whether it still lists it: {error.why}"
        return [(each, why or listed.get(each.adapter, trouble) if each.requested else why) for each, why in found]


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise StoreError for files of a round that cannot be read or removed."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"remove old files from {directory}",
            f"{error.filename or directory}: {error.strerror or error}",
            "Let this user write there; the removal is retried.",
            retryable=True,
        ) from error


def _leftovers(directory: Path) -> list[Path]:
    with _explained(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in directory.iterdir() if path.name not in STAYS]
    return []


def _size(directory: Path) -> int:
    return sum(_size_of(path) for path in _leftovers(directory))


def _size_of(path: Path) -> int:
    """Bytes in a file or below a directory, without following links."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(map(_size_of, path.iterdir()))
    return 0


def _set_aside(directory: Path) -> None:
    """Rename the adapter, if there is one, so that nothing loads it."""
    aside, adapter = directory / ASIDE, directory / ADAPTER_DIR
    with _explained(directory), contextlib.suppress(FileNotFoundError):
        if adapter.exists() and aside.is_dir():
            shutil.rmtree(aside)  # of an earlier removal that was killed
        adapter.rename(aside)


def _remove(directory: Path) -> int:
    """Remove the files of a round that do not stay; returns their bytes."""
    size = _size(directory)
    spec = directory / SPEC_FILE
    # Most of its bytes are its tasks, which are in the state. What is no specification stays as it is.
    with _explained(directory), contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        write_json(spec, {**json.loads(spec.read_bytes()), **WITHOUT_TASKS})
    for path in _leftovers(directory):
        # Another process may remove it too.
        with _explained(directory), contextlib.suppress(FileNotFoundError):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
    return size
