"""From Studio's commit to the task: `python -m benchmarks.latency`.

A real `flywheel run` follows a database of 10,000 spans with `settle_seconds` 0; nobody answers at its judge's
address. A writer commits a reply or two at random moments. Their time ends when their line is whole in tasks.jsonl
(`commit_to_task_ms_*`) and when their row is in the state database (`commit_to_state_ms_*`). `idle_*` are the same
for commits so far apart that the daemon has nothing else to do.
"""

from __future__ import annotations

import json
import random
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import orjson

from benchmarks import daemon, measurement
from benchmarks.databases import SCHEMAS, Database, cached
from benchmarks.measurement import percentile
from benchmarks.writer import Writer, copy

REPLY_SPANS: Final = (2, 3, 4, 5)
LOOK_SECONDS: Final = 0.001
GIVE_UP_SECONDS: Final = 120.0


class Observer:
    """Looks at what the daemon writes, once in a millisecond, and notes when a trace is there."""

    def __init__(self, state: Path) -> None:
        self.in_file: dict[str, float] = {}
        self.in_state: dict[str, float] = {}
        self._database = sqlite3.connect(f"file:{state / 'state.db'}?mode=ro", uri=True, isolation_level=None)
        self._version = 0
        self._last = 0
        self._file = (state / "tasks.jsonl").open("rb")
        self._torn = b""

    def close(self) -> None:
        self._database.close()
        self._file.close()

    def look(self) -> None:
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            found = self._database.execute(
                "SELECT id, trace_id FROM replies WHERE id > ? AND task_id IS NOT NULL ORDER BY id", (self._last,)
            ).fetchall()
            now = time.monotonic()
            for self._last, trace in found:
                self.in_state.setdefault(trace, now)
        if added := self._file.read():
            now = time.monotonic()
            *lines, self._torn = (self._torn + added).split(b"\n")
            for line in lines:
                self.in_file.setdefault(orjson.loads(line)["metadata"]["trace_id"], now)


def measure(database: Database, observer: Observer, commits: int, gaps: tuple[float, float], seed: int) -> Any:
    """Milliseconds from commit to file and to state, of the replies of `commits` with `gaps` seconds between them."""
    rng = random.Random(seed)
    committed: dict[str, float] = {}

    def write() -> None:
        writer = Writer(database, seed=seed)
        for _ in range(commits):
            rows, runs, _ = writer.prepare(rng.choice(REPLY_SPANS))
            time.sleep(rng.uniform(*gaps))
            writer.commit(rows, runs)
            now = time.monotonic()
            committed.update((row[1], now) for row in rows)
        writer.close()

    writing = threading.Thread(target=write)
    writing.start()
    end = time.monotonic() + commits * gaps[1] + GIVE_UP_SECONDS
    while writing.is_alive() or not committed.keys() <= observer.in_file.keys() & observer.in_state.keys():
        observer.look()
        if time.monotonic() > end:
            writing.join()
            missing = len(committed.keys() - observer.in_file.keys())
            sys.exit(f"{missing} of {len(committed)} replies are not in the task file after {GIVE_UP_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    writing.join()
    return tuple(
        [max(0.0, (there[trace] - moment) * 1000) for trace, moment in committed.items()]
        for there in (observer.in_file, observer.in_state)
    )


@contextmanager
def following(database: Database, folder: Path) -> Iterator[Path]:
    """`flywheel run` over the database; gives its state directory once all that is there is in the task file."""
    with socket.socket() as closed:
        # Bound and never listened at: a connection is refused, and nobody else gets the port meanwhile.
        closed.bind(("127.0.0.1", 0))
        config = folder / "flywheel.yaml"
        config.write_text(
            json.dumps(
                {
                    "state": {"dir": "state"},
                    "sources": [{"path": str(database.path)}],
                    "ingest": {"settle_seconds": 0},
                    "judge": {"base_url": f"http://127.0.0.1:{closed.getsockname()[1]}/v1", "model": "nobody"},
                }
            )
        )
        with daemon.running(config) as process:
            tasks = database.truth.tasks
            seconds = GIVE_UP_SECONDS + tasks
            daemon.wait_for(process, folder, lambda: daemon.has_tasks(folder, tasks), f"bring {tasks} tasks", seconds)
            yield folder / "state"


def main() -> None:
    options = measurement.parser("latency", __doc__)
    options.add_argument("--spans", type=int)
    options.add_argument("--schema", choices=SCHEMAS, default="new")
    options.add_argument("--commits", type=int)
    given = options.parse_args()
    spans = given.spans or (300 if given.quick else 10_000)
    commits = given.commits or (5 if given.quick else 300)
    idle_commits = max(2, commits // 5)
    before = measurement.machine()
    with measurement.folders(given.dir) as (kept, scratch):
        database = copy(cached(kept, spans, given.schema), scratch, "studio")
        with following(database, scratch) as state:
            observer = Observer(state)
            observer.look()
            busy, busy_state = measure(database, observer, commits, (0.0, 0.5), seed=1)
            idle, idle_state = measure(database, observer, idle_commits, (1.0, 2.0), seed=2)
            observer.close()
    result = {
        "commit_to_task_ms_p50": round(median(busy), 1),
        "commit_to_task_ms_p99": round(percentile(busy, 0.99), 1),
        "commit_to_state_ms_p50": round(median(busy_state), 1),
        "commit_to_state_ms_p99": round(percentile(busy_state, 0.99), 1),
        "idle_commit_to_task_ms_p50": round(median(idle), 1),
        "idle_commit_to_task_ms_p99": round(percentile(idle, 0.99), 1),
        "idle_commit_to_state_ms_p50": round(median(idle_state), 1),
        "replies": len(busy),
        "idle_replies": len(idle),
        "spans": spans,
        "schema": database.schema,
    }
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
