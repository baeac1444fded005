"""A restart over many judged tasks: `python -m benchmarks.restart`.

`restart_first_verdict_s`: from the start of the process `flywheel filter` until its judge is asked for the first
time, with `tasks` that were judged before and a few that were not; the judge's own time is not in it. `calls` is how
often it was asked: once for each new task. `rejudged_per_second`: how many tasks another threshold decides anew in a
second, without a call.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import orjson
import yaml
from sqlalchemy import Connection, insert

from benchmarks import measurement
from benchmarks.judge_endpoint import CRITERIA, answer_to
from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.verdicts import point

NEW: Final = 5
CHUNK: Final = 2_000
RUBRIC: Final[dict[str, Any]] = {
    "id": "benchmark",
    "criteria": [{"id": name, "value": f"The answer is {name}."} for name in CRITERIA],
}


class Judge:
    """Answers at once, and knows when it was asked first."""

    def __init__(self) -> None:
        judge = self
        self.calls = 0
        self.first = 0.0

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                judge.first = judge.first or time.perf_counter()
                judge.calls += 1
                body = answer_to(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def line(number: int) -> dict[str, Any]:
    """A task as ingestion writes it, of a few hundred words."""
    query, answer = f"How long are {number} days? " * 10, f"They are {24 * number} hours. " * 30
    names = ("source", "trace_id", "conversation_id", "agent_name", "model", "adapter", "started_at", "reference")
    return {
        "task_id": f"t-{number:020x}",
        "main_query": query,
        "init_messages": [{"role": "system", "content": "You do sums."}],
        "answer": answer,
        "metadata": {
            **dict.fromkeys(names, ""),
            "span_id": f"{number:016x}",
            "tools_json": "[]",
            "trajectory_json": "[]",
        },
    }


def fill(conn: Connection, first: int, count: int, rubric_hash: str, judge_hash: str, hashes: dict[str, str]) -> None:
    """Tasks from `first` on with their verdicts; those without a rubric's hash are pending."""
    now = utcnow()
    tasks = [
        {
            "id": number,
            "key": f"t-{number:020x}",
            "conversation_id": f"c-{number}",
            "agent": "Tutor",
            "started_at": now,
            "split": Split.TRAIN.value if number % 3 else Split.HELD_OUT.value,
            "state": TaskState.ACCEPTED.value if rubric_hash else TaskState.PENDING.value,
            "payload": line(number),
            "created_at": now,
        }
        for number in range(first, first + count)
    ]
    conn.execute(insert(schema.tasks), tasks)
    if not rubric_hash:
        return
    results = [
        {"criterion": name, "choice": "yes", "value": 1.0, "passed": True, "reason": "It is so.", "hash": told}
        for name, told in hashes.items()
    ]
    judgement = {"outcome": "accepted", "score": 1.0, "results": results, "calls": 1, "prompt_tokens": 400}
    verdict = {
        "rubric_hash": rubric_hash,
        "judge_hash": judge_hash,
        "outcome": "accepted",
        "score": 1.0,
        "results": results,
        "judgements": [judgement],
        "reason": "It is so.",
        "calls": 1,
        "created_at": now,
    }
    conn.execute(insert(schema.verdicts), [{**verdict, "task_id": task["id"]} for task in tasks])
    point(conn, [task["id"] for task in tasks])


async def prepare(folder: Path, url: str, tasks: int) -> Path:
    """A state with so many judged tasks and a few new ones; the configuration."""
    (folder / "rubric.yaml").write_text(yaml.safe_dump(RUBRIC))
    (folder / "strict.yaml").write_text(yaml.safe_dump({**RUBRIC, "threshold": 0.9}))
    config = folder / "flywheel.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "sources": [],
                "state": {"dir": "state"},
                "judge": {"base_url": url, "model": "judge"},
                "filter": {"rubric": "rubric.yaml"},
            }
        )
    )
    grader = Grader(Rubric.model_validate(RUBRIC), JudgeSettings(base_url=url, model="judge"))
    store = await Store.open(folder / "state")
    for first in range(1, tasks + 1, CHUNK):
        count = min(CHUNK, tasks + 1 - first)
        await store.write(fill, first, count, grader.rubric.hash, grader.judge_hash, dict(grader.hashes))
    await store.write(fill, tasks + 1, NEW, "", "", {})
    await store.close()
    grader.close()
    return config


def run(config: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flywheel", "filter", "-c", str(config), *arguments, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    found: dict[str, Any] = orjson.loads(ran.stdout)
    return found


def main() -> None:
    import asyncio

    options = measurement.parser("restart", __doc__).parse_args()
    before = measurement.machine()
    tasks = 2_000 if options.quick else 100_000
    judge = Judge()
    with measurement.folders(options.dir) as (_, scratch):
        config = asyncio.run(prepare(scratch, judge.url, tasks))
        measurement.warm(scratch / "state" / "state.db")
        began = time.perf_counter()
        report = run(config)
        if (report["accepted"], report["reused"], judge.calls) != (NEW, 0, NEW):
            raise SystemExit(f"not what should have happened: {report['judged']} judged, {judge.calls} calls")
        first = judge.first - began
        calls = judge.calls
        began = time.perf_counter()
        report = run(config, "--rejudge", "--rubric", str(scratch / "strict.yaml"), "--limit", str(tasks // 20))
        seconds = time.perf_counter() - began
        if (report["reused"], judge.calls) != (tasks // 20, calls):
            raise SystemExit(f"not what should have happened: {report['reused']} reused, {judge.calls - calls} calls")
    judge.server.shutdown()
    judge.server.server_close()
    result = {
        "restart_first_verdict_s": round(first, 3),
        "rejudged_per_second": round(tasks / 20 / seconds, 1),
        "tasks": tasks,
        "calls": calls,
    }
    measurement.report(result, before, as_json=options.json)


if __name__ == "__main__":
    main()
