"""A daemon at rest: `python -m benchmarks.idle`.

A real `flywheel run` follows two Studio databases of 200,000 spans each, with a webhook and an inference server that
are not there. It ingests them and judges its first tasks until its budget of judge tokens is used up. Then nothing
happens any more, and the measurement begins:

`rss_mb`: resident memory of the daemon and of any child process that stays, at the end.
`core_percent`: processor time of the same processes over `seconds`, as percent of one core.
`threads`, `loop_tasks`: threads, those of watchdog apart, and tasks of the event loop, at the end. `of_sources` of
them are named after a source.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from benchmarks import daemon, judge_endpoint, measurement
from benchmarks.counted import FILE
from benchmarks.databases import Database, cached
from benchmarks.writer import copy

SOURCES: Final = 2
TOKENS_OF_A_CALL: Final = 460
"""What `judge_endpoint` reports for each answer."""
SETTLE_SECONDS: Final = 45.0
"""An idle daemon releases memory after up to 30 seconds."""
GIVE_UP_SECONDS: Final = 300.0


def write_config(folder: Path, databases: Sequence[Database], judge: str, judged: int, dead: str) -> Path:
    rubric = {
        "id": "benchmark",
        "criteria": [
            # As in the shipped rubrics: a check that loads a model of languages.
            {"id": "language", "type": "language"},
            *({"id": name, "value": f"The answer is {name}."} for name in judge_endpoint.CRITERIA),
        ],
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
                "serving": {"urls": [dead]},
                "notify": [{"url": f"{dead}/events", "on": ["budget_spent"]}],
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
    """Processor time over `seconds`, and resident memory at the end, of the process and its children."""
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
        "seconds": round(took, 1),
    }


def counted(process: psutil.Popen, file: Path, paths: Sequence[Path]) -> dict[str, Any]:
    """What `benchmarks.counted` writes about the process."""
    process.send_signal(signal.SIGUSR1)
    daemon.wait_for(process, file.parent, file.exists, "count its threads", GIVE_UP_SECONDS)
    found = json.loads(file.read_text())
    named = [*found["threads"], *found["tasks"]]
    own = sum(not name.startswith("watchdog ") for name in found["threads"])
    # The system's own threads, such as those of a library in C, have no name here.
    return {
        "threads": process.num_threads() - len(found["threads"]) + own,
        "loop_tasks": len(found["tasks"]),
        "of_sources": sum(str(path) in name for name in named for path in paths),
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
        tasks = sum(database.truth.tasks for database in databases)
        # Bound and never listening: connections to it are refused, and nobody else gets the port.
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
            config = write_config(scratch, databases, judge, judged, dead)
            os.environ[FILE] = str(file := scratch / "counted.json")
            with daemon.running(config, "benchmarks.counted") as process:
                verdicts = await_rest(process, scratch, tasks, judged)
                time.sleep(1.0 if given.quick else SETTLE_SECONDS)
                result = at_rest(process, seconds)
                result |= counted(process, file, [each.path for each in databases])
    result |= {"sources": SOURCES, "spans": spans, "tasks": tasks, "judged": verdicts}
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
