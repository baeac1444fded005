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
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flywheel.config.file import Config, load
from flywheel.daemon.source_supervisor import SourceSupervisor
from flywheel.daemon.status import as_json, snapshot
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store, read_once
from flywheel.system.signals import Stop, StopReason
from tests import warm
from tests.factories.config import write_config
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
CANNOT = 77


def configuration(folder: Path, sources: Iterable[Path], **ingest: Any) -> Config:
    """Of sources that close replies at once; what ends in `.jsonl`, and what has no ending, are lines."""
    entries = [{"path": str(path), "type": "studio" if path.suffix == ".sqlite" else "jsonl"} for path in sources]
    return load(write_config(folder, sources=entries, ingest={"settle_seconds": 0, **ingest}))


def killed_at(config: Path, point: str, arrival: int) -> subprocess.CompletedProcess[bytes]:
    """Ingestion that dies at its n-th arrival at a point of `tests.daemon.killed`."""
    command = [sys.executable, "-m", "tests.daemon.killed", str(config), point, str(arrival)]
    done = warm.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, f"{point} {arrival}: {done.stderr.decode()[-3000:]}"
    return done


class Following:
    """What reads the sources in a running daemon."""

    def __init__(self, config: Config, *, poll_seconds: float = 0.1) -> None:
        self._config = config
        self._poll_seconds = poll_seconds
        self._stop = Stop()

    async def __aenter__(self) -> Self:
        self._store = await Store.open(self._config.state_dir)
        self._ingestion = Ingestion(self._store, self._config)
        self._sources = SourceSupervisor(self._store, self._config, self._ingestion, self._stop, lambda _: None)
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
        self._stop.ask(StopReason.FINISHED)
        await self._sources.stop()
        await self._ingestion.close()
        await self._store.close()


async def status(config: Config) -> dict[str, Any]:
    """What `flywheel status --json` prints. It reads again if the daemon has just made the state."""
    return as_json(await read_once(config.state_dir, snapshot, config))


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
    async with Following(load(folder / "flywheel.yaml")):
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
