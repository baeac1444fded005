"""States on disk: opened for a test, written, read, filled by ingestion, and held by a daemon."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

from flywheel.config.file import Config
from flywheel.daemon.service import Service
from flywheel.sources.audit import DeepAudit, deep_audit
from flywheel.sources.ingestion import Ingestion, SourceReport
from flywheel.store.kernel.database import Store

T = TypeVar("T")


@asynccontextmanager
async def open_state(state_dir: Path) -> AsyncIterator[Store]:
    store = await Store.open(state_dir)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def copied_state(state_dir: Path) -> AsyncIterator[Store]:
    """A copy, as a dry run works on."""
    store = await Store.copy(state_dir)
    try:
        yield store
    finally:
        await store.close()


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It runs in a thread of its own: Playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def write_state(state_dir: Path, work: Callable[..., T], *arguments: Any, **values: Any) -> T:
    """What `work` returns, called with a connection to the state in one transaction. For tests without a loop."""

    async def write() -> T:
        async with open_state(state_dir) as store:
            return await store.write(work, *arguments, **values)

    return in_thread(write())


def read_state(state_dir: Path, work: Callable[..., T], *arguments: Any, **values: Any) -> T:
    async def read() -> T:
        async with open_state(state_dir) as store:
            return await store.read(work, *arguments, **values)

    return in_thread(read())


async def ingest(config: Config, *, sweep: bool = False) -> list[SourceReport]:
    """One pass over all sources, as `flywheel ingest` makes it."""
    async with open_state(config.state_dir) as store:
        ingestion = Ingestion(store, config)
        try:
            return await ingestion.run(final=True, sweep=sweep)
        finally:
            await ingestion.close()


async def deep_audited(config: Config) -> DeepAudit:
    async with open_state(config.state_dir) as store:
        return await deep_audit(store, config)


@asynccontextmanager
async def running_daemon(config: Config) -> AsyncIterator[Service]:
    """A daemon in this process, which is stopped at the end."""
    async with open_state(config.state_dir) as store:
        daemon = Service(config, store)
        task = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            daemon.stop()
            await asyncio.wait([task])
        task.result()


def execute(database: Path, sql: str, *values: Any) -> list[Any]:
    """The rows of a statement on any SQLite file; what it changes is committed."""
    with closing(sqlite3.connect(database)) as connection, connection:
        return connection.execute(sql, values).fetchall()
