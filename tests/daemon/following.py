"""The sources of a daemon without the rest of it, polled quickly.

As a process: `python -m tests.daemon.following FOLDER`, until its standard input ends. Permissions hold for it even
if it is root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flywheel.config import Config, parse
from flywheel.daemon.source_supervisor import SourceSupervisor
from flywheel.daemon.status import snapshot
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store

SOON = 120.0

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
CANNOT = 77


def configuration(folder: Path, sources: Iterable[Path], **ingest: Any) -> Config:
    """Of sources that close replies at once; what ends in `.jsonl`, and what has no ending, are lines."""
    raw = {
        "state": {"dir": "state"},
        "sources": [
            {"path": str(path), "type": "studio" if path.suffix == ".sqlite" else "jsonl"} for path in sources
        ],
        "ingest": {"settle_seconds": 0, **ingest},
    }
    (folder / "flywheel.yaml").write_text(json.dumps(raw))
    return parse(raw, "the tests' configuration", folder)


class Following:
    """What reads the sources in a running daemon."""

    def __init__(self, config: Config, *, poll_seconds: float = 0.1) -> None:
        self._config = config
        self._poll_seconds = poll_seconds
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._store = await Store.open(self._config.state_dir)
        self._ingestion = Ingestion(self._store, self._config)
        self._sources = SourceSupervisor(self._store, self._config, self._ingestion, self._stopping, lambda _: None)
        await self._sources.start()
        self._polling = asyncio.create_task(self._poll())
        return self

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            self._sources.refresh()
            self._sources.poll()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._polling
        self._stopping.set()
        await self._sources.stop()
        await self._ingestion.close()
        await self._store.close()


async def status(config: Config) -> dict[str, Any]:
    """What `flywheel status --json` prints."""
    store = await Store.view(config.state_dir)
    try:
        return (await store.read(snapshot, config)).as_json()
    finally:
        await store.close()


async def source(config: Config, path: Path) -> dict[str, Any]:
    """What the status says of one source; empty if it does not know it."""
    found = await status(config)
    shown: dict[str, Any] = next((each for each in found["sources"] if each["path"] == str(path)), {})
    return shown


def exported(config: Config) -> list[str]:
    """The ids of the spans in the task file, line by line. The last line may just be being written."""
    if not config.task_file.exists():
        return []
    whole, _, _ = config.task_file.read_bytes().rpartition(b"\n")
    return [json.loads(line)["metadata"]["span_id"] for line in whole.splitlines()]


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition, which may be a coroutine's."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {SOON:g} s in vain for {what}")


async def becomes(config: Config, path: Path, condition: str) -> dict[str, Any]:
    """Wait until a source is in a condition; what the status says of it then."""
    shown: dict[str, Any] = {}

    async def is_so() -> bool:
        shown.clear()
        shown.update(await source(config, path))
        return bool(shown.get("condition") == condition)

    try:
        await until(is_so, f"{path.name} to be {condition}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {shown}") from None
    return shown


async def _serve(folder: Path) -> None:
    config = parse(json.loads((folder / "flywheel.yaml").read_text()), "the tests' configuration", folder)
    async with Following(config):
        await asyncio.to_thread(sys.stdin.read)


def give_up_privileges() -> None:
    """Root that may not pass over permissions: the next program that this process becomes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            sys.exit(CANNOT)


def main() -> None:
    if os.geteuid() == 0 and len(sys.argv) == 2:
        give_up_privileges()
        os.execv(sys.executable, [sys.executable, "-m", "tests.daemon.following", sys.argv[1], "again"])
    asyncio.run(_serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
