"""A pass over a database that has been ingested: `python -m benchmarks.poll`.

`idle_ms`: nothing is new. `new100_ms`: another connection has committed 100 spans; measured until their tasks are in
the state (`new100_state_ms`) and in the task file as well. Both on the large database; `size_ratio` is the larger of
their ratios to a small one. `look_back_ms` is what the daemon does afterwards, to find what was changed in place.
`longest_read_ms` is the longest read transaction of all, the first ingestion included.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import measurement
from benchmarks.databases import SCHEMAS, Database, cached
from benchmarks.writer import Writer, copy
from flywheel.config.file import parse
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store

NEW_SPANS = 100


class Follower:
    """An ingestion that follows one database, with the writer of that database."""

    def __init__(self, database: Database, folder: Path, seed: int) -> None:
        self.writer = Writer(database, seed=seed)
        self.state = folder / "state"
        self.idle_ms: list[float] = []
        self.new_ms: list[float] = []
        self.state_ms: list[float] = []
        self.look_back_ms: list[float] = []
        self._config = parse(
            {
                "state": {"dir": str(self.state)},
                "sources": [{"path": str(database.path)}],
                "ingest": {"settle_seconds": 0},
            },
            "the benchmark's",
            folder,
        )

    async def start(self, tasks: int) -> None:
        self.store = await Store.open(self.state)
        self.ingestion = Ingestion(self.store, self._config)
        (self.source,) = self.ingestion.sources()
        await self._pass(tasks)
        self.state_ms.clear()
        await self._look_back()

    async def stop(self) -> None:
        await self.ingestion.close()
        await self.store.close()
        self.writer.close()

    async def idle(self) -> None:
        self.idle_ms.append(await self._pass(0))

    async def new(self) -> None:
        rows, runs, truth = self.writer.prepare(NEW_SPANS)
        self.writer.commit(rows, runs)
        self.new_ms.append(await self._pass(truth.tasks))
        self.look_back_ms.append(await self._look_back())

    async def _pass(self, tasks: int) -> float:
        """As the daemon does it; milliseconds."""
        began = time.perf_counter()
        report = await self.source.read()
        if report.new:
            self.state_ms.append((time.perf_counter() - began) * 1000)
            await self.ingestion.export()
        taken = (time.perf_counter() - began) * 1000
        if report.error is not None or report.new != tasks:
            sys.exit(f"{report.path}: {report.new} new tasks instead of {tasks}: {report.error or ''}")
        return taken

    async def _look_back(self) -> float:
        began = time.perf_counter()
        found = await self.source.rescan()
        if found.new_tasks:
            sys.exit(f"a look back found {found.new_tasks} tasks that the pass had missed")
        return (time.perf_counter() - began) * 1000

    def longest_read_ms(self) -> float:
        with closing(sqlite3.connect(self.state / "state.db")) as state:
            (longest,) = state.execute("SELECT max(longest_read_ms) FROM sources").fetchone()
        return float(longest)


async def follow(large: Database, small: Database, scratch: Path, repetitions: int) -> dict[str, Any]:
    """Both databases in turn, in one process."""
    followers = []
    for seed, database in enumerate((small, large)):
        folder = scratch / str(seed)
        folder.mkdir()
        follower = Follower(copy(database, folder, "studio"), folder, seed)
        await follower.start(database.truth.tasks)
        followers.append(follower)
    for _ in range(repetitions):
        for follower in followers:
            await follower.new()
            # The pass after new rows may still have to settle something.
            await follower.idle()
            follower.idle_ms.pop()
            for _ in range(5):
                await follower.idle()
    for follower in followers:
        await follower.stop()
    below, above = followers
    idle_ratio = median(above.idle_ms) / median(below.idle_ms)
    new_ratio = median(above.new_ms) / median(below.new_ms)
    return {
        "idle_ms": round(median(above.idle_ms), 3),
        "new100_ms": round(median(above.new_ms), 2),
        "size_ratio": round(max(idle_ratio, new_ratio), 2),
        "longest_read_ms": above.longest_read_ms(),
        "idle_ratio": round(idle_ratio, 2),
        "new100_ratio": round(new_ratio, 2),
        "idle_ms_p99": round(measurement.percentile(above.idle_ms, 0.99), 3),
        "new100_ms_p99": round(measurement.percentile(above.new_ms, 0.99), 2),
        "new100_state_ms": round(median(above.state_ms), 2),
        "new100_state_ratio": round(median(above.state_ms) / median(below.state_ms), 2),
        "look_back_ms": round(median(above.look_back_ms), 2),
        "spans": large.truth.spans,
        "spans_small": small.truth.spans,
        "schema": large.schema,
        "repetitions": repetitions,
    }


def main() -> None:
    options = measurement.parser("poll", __doc__)
    options.add_argument("--spans", type=int)
    options.add_argument("--schema", choices=SCHEMAS, default="new")
    options.add_argument("--repetitions", type=int)
    given = options.parse_args()
    spans = given.spans or (1_500 if given.quick else 1_000_000)
    repetitions = given.repetitions or (3 if given.quick else 50)
    before = measurement.machine()
    with measurement.folders(given.dir) as (kept, scratch):
        large = cached(kept, spans, given.schema)
        small = cached(kept, min(10_000, spans // 3), given.schema)
        result = asyncio.run(follow(large, small, scratch, repetitions))
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
