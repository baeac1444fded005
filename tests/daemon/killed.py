"""Ingestion that kills itself: `python -m tests.daemon.killed CONFIG POINT N` dies at its n-th arrival at a point.

The product knows nothing of the points: its functions are wrapped here. Ends with 3 if it never got there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from flywheel.config.file import load
from flywheel.sources import calls_connector, studio_connector
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.jsonl.reader import JsonlReader
from flywheel.sources.studio import database, reader
from flywheel.sources.studio.extraction import TraceExtractor
from flywheel.sources.studio.workers import Workers
from flywheel.store import placed_calls, task_file
from flywheel.store.kernel.database import Store
from flywheel.system.files import append_lines

POINTS: Final = (
    "before read",
    "after read",
    "before extraction",
    "before request",
    "after request",
    "before commit",
    "after commit",
    "before append",
    "in append",
    "after append",
)
CALLS_POINTS: Final = ("before place", "after place", "before record", "after record")
"""Of a source of recorded calls."""
PATIENCE_SECONDS: Final = 120.0
PAGE_ROWS: Final = 25
LONG_ROWS: Final = 40


class Trap:
    """Where and at which arrival this process dies."""

    def __init__(self, point: str, arrival: int) -> None:
        assert point in (*POINTS, *CALLS_POINTS)
        self._point = point
        self.long_rows = 10**9 if point == "before extraction" else LONG_ROWS
        """This process extracts by itself, or workers do as soon as there is more than a page."""
        self._left = arrival

    def is_next(self, point: str) -> bool:
        """Count an arrival; whether it is the last one."""
        self._left -= point == self._point
        return self._left <= 0 and point == self._point

    def pass_by(self, point: str) -> None:
        if self.is_next(point):
            os.kill(os.getpid(), signal.SIGKILL)


def set_up(trap: Trap) -> None:
    read, lines, write, append = database.Database.page, JsonlReader.read, Store.write, append_lines
    extract, ask = TraceExtractor.extract, Workers._ask

    def trapped_page(self: database.Database, *args: Any) -> Any:
        trap.pass_by("before read")
        found = read(self, *args)
        trap.pass_by("after read")
        return found

    def trapped_extract(self: TraceExtractor, traces: Any) -> Any:
        trap.pass_by("before extraction")
        return extract(self, traces)

    def trapped_ask(self: Workers, *args: Any) -> Any:
        trap.pass_by("before request")
        answer = ask(self, *args)
        trap.pass_by("after request")
        return answer

    def trapped_lines(self: JsonlReader, *args: Any, **kwargs: Any) -> Iterator[Any]:
        trap.pass_by("before read")
        for batch in lines(self, *args, **kwargs):
            trap.pass_by("after read")
            yield batch
            trap.pass_by("before read")

    async def trapped_write(self: Store, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def last_thing_before_commit(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            trap.pass_by("before commit")
            return result

        step = {placed_calls.place: "place", calls_connector.record: "record"}.get(function, "")
        trap.pass_by(f"before {step}")
        result = await write(self, last_thing_before_commit, *args, **kwargs)
        trap.pass_by("after commit")
        trap.pass_by(f"after {step}")
        return result

    def trapped_append(path: Path, lines: list[bytes], **kwargs: Any) -> int:
        if not lines:
            return append(path, lines, **kwargs)
        trap.pass_by("before append")
        if trap.is_next("in append"):
            torn = b"".join(lines)
            with path.open("ab") as file:
                file.write(torn[: max(1, len(torn) * 2 // 3)])
            os.kill(os.getpid(), signal.SIGKILL)
        count = append(path, lines, **kwargs)
        trap.pass_by("after append")
        return count

    calls_connector.CALLS_AT_ONCE = 5  # type: ignore[misc]  # many transactions in a pass
    database.PAGE_ROWS = reader.BATCH_ROWS = PAGE_ROWS  # type: ignore[misc]  # many batches in a pass
    studio_connector.LONG_ROWS = trap.long_rows  # type: ignore[misc]
    TraceExtractor.extract = trapped_extract  # type: ignore[method-assign]
    Workers._ask = trapped_ask  # type: ignore[method-assign]
    studio_connector.JOINED_BATCHES = 1  # type: ignore[misc]  # each with a commit, however fast they are read
    database.Database.page = trapped_page  # type: ignore[method-assign,assignment]
    JsonlReader.read = trapped_lines  # type: ignore[method-assign]
    Store.write = trapped_write  # type: ignore[method-assign]
    task_file.append_lines = trapped_append  # type: ignore[attr-defined]


async def ingest_for_ever(config_file: Path) -> None:
    config = load(config_file)
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        for report in await ingestion.run():
            if report.error is not None and not report.error.retryable:
                raise report.error
        await asyncio.sleep(0.02)


def main() -> None:
    config_file, point, arrival = sys.argv[1:]
    set_up(Trap(point, int(arrival)))
    asyncio.run(ingest_for_ever(Path(config_file)))
    sys.exit(3)


if __name__ == "__main__":
    main()
