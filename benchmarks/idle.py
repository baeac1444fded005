"""A daemon at rest: `python -m benchmarks.idle`.

A real `flywheel run` follows three Studio databases of 200,000 spans each. It ingests them and judges its first tasks
until its budget of judge tokens is used up. Then nothing happens any more, and the measurement begins:

`rss_mb`: resident memory of the daemon and of any child process that stays, at the end.
`core_percent`: processor time of the same processes over `seconds`, as percent of one core.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from benchmarks import daemon, judge_endpoint, measurement
from benchmarks.databases import Database, cached
from benchmarks.writer import copy

SOURCES: Final = 3
TOKENS_OF_A_CALL: Final = 460
"""What `judge_endpoint` reports for each answer."""
SETTLE_SECONDS: Final = 45.0
"""An idle daemon releases memory after up to 30 seconds."""
GIVE_UP_SECONDS: Final = 300.0


def write_config(folder: Path, databases: Sequence[Database], judge: str, judged: int) -> Path:
    rubric = {
        "id": "benchmark",
        "criteria": [{"id": name, "value": f"The answer is {name}."} for name in judge_endpoint.CRITERIA],
    }
    (folder / "rubric.yaml").write_text(yaml.safe_dump(rubric))
    config = folder / "flywheel.yaml"
    config.write_text(
        json.dumps(
            {
                "state": {"dir": "state"},
                "sources": [{"path": str(database.path)} for database in databases],
                "judge": {
                    "base_url": judge,
                    "model": "judge",
                    "budget": {"tokens_per_run": judged * TOKENS_OF_A_CALL},
                },
                "filter": {"rubric": "rubric.yaml"},
                "trigger": {"min_samples": 1_000_000},
            }
        )
    )
    return config


def await_rest(process: psutil.Popen, folder: Path, tasks: int, judged: int) -> int:
    """Wait until all tasks are in the task file and the budget is used up; the number of verdicts."""
    daemon.wait_for(
        process,
        folder,
        lambda: daemon.has_tasks(folder, tasks) and _verdicts(folder) >= judged,
        f"ingest {tasks} tasks and judge {judged}",
        GIVE_UP_SECONDS + tasks / 100,
    )
    return _verdicts(folder)


def _verdicts(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'state' / 'state.db'}?mode=ro", uri=True)) as state:
        (count,) = state.execute("SELECT count(*) FROM verdicts").fetchone()
    return int(count)


def at_rest(process: psutil.Popen, seconds: float) -> dict[str, Any]:
    """Processor time over `seconds` and resident memory at the end, of the process and its children."""
    before = _cpu_seconds(process)
    began = time.monotonic()
    time.sleep(seconds)
    spent = _cpu_seconds(process) - before
    took = time.monotonic() - began
    children = process.children(recursive=True)
    rss = sum(one.memory_info().rss for one in (process, *children))
    return {
        "rss_mb": round(rss / 2**20, 1),
        "core_percent": round(100 * spent / took, 3),
        "children": len(children),
        "threads": process.num_threads(),
        "seconds": round(took, 1),
    }


def _cpu_seconds(process: psutil.Popen) -> float:
    spent = process.cpu_times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for child in process.children(recursive=True):
        of_child = child.cpu_times()
        total += of_child.user + of_child.system
    return float(total)


def main() -> None:
    options = measurement.parser("idle", __doc__)
    options.add_argument("--spans", type=int, help="spans of each source (default: 200,000)")
    options.add_argument("--judged", type=int, help="tasks of the first judged batch (default: 500)")
    options.add_argument("--seconds", type=float, help="length of the measurement (default: 60)")
    given = options.parse_args()
    spans = given.spans or (300 if given.quick else 200_000)
    judged = given.judged or (20 if given.quick else 500)
    seconds = given.seconds or (2.0 if given.quick else 60.0)
    before = measurement.machine()
    with measurement.folders(given.dir) as (kept, scratch), judge_endpoint.running(0.0) as judge:
        databases = []
        for seed in range(SOURCES):
            made = cached(kept, spans, "new", seed=seed)
            databases.append(copy(made, scratch, f"studio-{seed}"))
        config = write_config(scratch, databases, judge, judged)
        tasks = sum(database.truth.tasks for database in databases)
        with daemon.running(config) as process:
            verdicts = await_rest(process, scratch, tasks, judged)
            time.sleep(1.0 if given.quick else SETTLE_SECONDS)
            result = at_rest(process, seconds)
    result |= {"sources": SOURCES, "spans": spans, "tasks": tasks, "judged": verdicts}
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
