"""The pages of a large state: `python -m benchmarks.web`.

A state of 100,000 tasks (`--tasks`) of six agents, in conversations of four, answered by four adapters and judged by
three criteria, is written by the store's own functions. A real `flywheel web` shows it; one client asks, one request
after the other, in random order. `list_p95_ms` is over the lists of tasks: the newest, older ones at random places,
and by each filter and pairs of filters. `pages_p95_ms` has each page by itself. `rss_mb` is the proportional set size
of the process (PSS of `/proc/PID/smaps_rollup`) 15 seconds after all requests. `status_user_s` is the user time of
`flywheel status` on the same state, `imports_user_s` that of importing sqlalchemy and pydantic alone: the least of
five measurements of each, taken in turn.
"""

from __future__ import annotations

import asyncio
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx2
from sqlalchemy import Connection, bindparam, insert, select, update

from benchmarks import measurement
from benchmarks.measurement import percentile
from flywheel.records.exclusion import ANY_MODEL
from flywheel.records.states import TaskState
from flywheel.records.task import Batch, entry_of
from flywheel.records.trace import Cursor, Reply
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.verdicts import point

AT_ONCE: Final = 5_000
SETTLE_SECONDS: Final = 15
"""Within this time, the process returns to the system what requests have freed."""
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
AGENTS: Final = ("Tutor", "Support", "Search", "Planner", "Writer", "Critic")
ADAPTERS: Final = ("", "agent@r0001", "agent@r0002", "agent@r0003")
CRITERIA: Final = ("correct", "complete", "polite")
WORDS: Final = (Path(__file__).parent / "words.txt").read_text().split()


def reply(number: int, rng: random.Random) -> Reply:
    question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(8, most))) for most in (40, 200))
    asked = START + timedelta(seconds=60 * number)
    return Reply(
        span_id=f"{number:016x}",
        trace_id=f"{number:032x}",
        conversation_id=f"conversation-{number // 4}",
        agent=rng.choice(AGENTS),
        query=question,
        answer=answer,
        started_at=asked,
        ended_at=asked + timedelta(seconds=3),
        adapter=rng.choice(ADAPTERS),
        history=({"role": "system", "content": "You help."},),
    )


def put(conn: Connection, first: int, count: int, rng: random.Random) -> None:
    """Tasks of so many replies, judged: two thirds are accepted."""
    replies = [reply(number, rng) for number in range(first, first + count)]
    entries = tuple(entry_of(each, "/traces.sqlite", ANY_MODEL) for each in replies)
    batch = Batch(cursor=Cursor(rowid=first + count, identity="1:2", fingerprint="f"), entries=entries)
    source = ledger.source_id(conn, "/traces.sqlite")
    ledger.record_batch(conn, source, batch, train_ratio=0.7, split_seed=42)
    pending = select(tasks.c.id).where(tasks.c.state == TaskState.PENDING.value)
    rows = []
    for number in conn.execute(pending).scalars().all():
        values = [rng.choice((0.0, 0.5, 1.0, 1.0)) for _ in CRITERIA]
        score = sum(values) / len(values)
        outcome = TaskState.ACCEPTED if score > 0.5 else TaskState.REJECTED
        rows.append({
            "task_id": number, "rubric_hash": "rubric", "judge_hash": "judge", "outcome": outcome.value,
            "score": score, "results": [
                {"criterion": name, "choice": "yes" if value > 0.5 else "no", "value": value, "passed": value > 0.5,
                 "reason": " ".join(rng.choices(WORDS, k=20)), "error": ""}
                for name, value in zip(CRITERIA, values, strict=True)
            ],
            "reason": " ".join(rng.choices(WORDS, k=20)), "calls": 1, "prompt_tokens": 500, "completion_tokens": 60,
            "created_at": (START + timedelta(seconds=60 * number + 30)).isoformat(timespec="milliseconds"),
        })  # fmt: skip
    conn.execute(insert(verdicts), rows)
    for outcome in (TaskState.ACCEPTED, TaskState.REJECTED):
        chosen = [{"number": row["task_id"]} for row in rows if row["outcome"] == outcome.value]
        changed = update(tasks).where(tasks.c.id == bindparam("number")).values(state=outcome.value)
        conn.execute(changed, chosen)
    point(conn, [row["task_id"] for row in rows])


async def fill(folder: Path, count: int) -> None:
    store = await Store.open(folder / "state")
    rng = random.Random(1)
    for first in range(0, count, AT_ONCE):
        await store.write(put, first, min(AT_ONCE, count - first), rng)
    await store.close()


def lists(count: int, rng: random.Random, requests: int) -> list[str]:
    """Addresses of lists, in random order."""
    filters: list[dict[str, Any]] = [
        {}, {"state": "accepted"}, {"state": "rejected"}, {"state": "held"}, {"split": "held-out"},
        *({"agent": name} for name in (*AGENTS, "nobody")), *({"adapter": name} for name in ("base", "r0002", "r9")),
        *({"criterion": name} for name in CRITERIA), {"lowest": 0.9}, {"highest": 0.1}, {"text": rng.choice(WORDS)},
        {"text": "no such words anywhere"}, {"judge": "judge"}, {"judge": "other"},
        {"state": "rejected", "agent": "Tutor", "criterion": "polite"}, {"agent": "Critic", "lowest": 0.99},
        {"order": "oldest"}, {"order": "lowest"}, {"order": "highest", "agent": "Tutor"},
        {"order": "lowest", "criterion": "polite"}, {"rubric": "rubric", "criterion": "polite", "week": "2026-01-05"},
    ]  # fmt: skip
    found = []
    for number in range(requests):
        query = dict(filters[number % len(filters)])
        if rng.random() < 0.5:
            query["after"] = rng.randint(1, count)
        found.append(f"/tasks?{urlencode(query)}")
    rng.shuffle(found)
    return found


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`flywheel web` on the state in `folder`, and its address."""
    (folder / "flywheel.yaml").write_text(f"state: {{dir: {folder / 'state'}}}\nmodel: {{alias: agent}}\n")
    command = [sys.executable, "-m", "flywheel", "web", "-c", str(folder / "flywheel.yaml"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise SystemExit("flywheel web did not start; see above")
        yield process, address[0].rstrip("/")
    finally:
        process.terminate()
        process.wait(60)


def pss_mb(pid: int) -> float:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def timed(client: httpx2.Client, path: str) -> float:
    """Milliseconds until the page is there."""
    begin = time.perf_counter()
    answer = client.get(path)
    spent = 1000 * (time.perf_counter() - begin)
    if answer.status_code != 200:
        raise SystemExit(f"{path} was answered with {answer.status_code}")
    return spent


def user_seconds(*arguments: str) -> float:
    """The user time of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def run(folder: Path, count: int, requests: int) -> dict[str, Any]:
    asyncio.run(fill(folder, count))
    rng = random.Random(2)
    with running(folder) as (process, address), httpx2.Client(base_url=address, timeout=600) as client:
        started = pss_mb(process.pid)
        timed(client, "/tasks")
        spent = [(timed(client, path), path) for path in lists(count, rng, requests)]
        links = re.findall(r'href="(/[a-z-]+)"', client.get("/tasks").text)
        others = [path for path in dict.fromkeys(["/", *links]) if path != "/tasks"]
        one = re.search(r'href="(/tasks/[^"?]+)"', client.get("/tasks").text)
        assert one is not None
        pages = {path: [timed(client, path) for _ in range(20)] for path in (*others, one[1])}
        time.sleep(SETTLE_SECONDS)
        used = pss_mb(process.pid)
    status = ("-m", "flywheel", "status", "-c", str(folder / "flywheel.yaml"))
    user = [(user_seconds(*status), user_seconds("-c", "import sqlalchemy, pydantic")) for _ in range(5)]
    shown, imports = (min(each) for each in zip(*user, strict=True))
    slowest = sorted(spent, reverse=True)[:5]
    return {
        "list_p95_ms": round(percentile([each for each, _ in spent], 0.95), 1),
        "list_median_ms": round(percentile([each for each, _ in spent], 0.5), 1),
        "slowest_lists": {path: round(each, 1) for each, path in slowest},
        "pages_p95_ms": {
            "/tasks/ID" if path == one[1] else path: round(percentile(found, 0.95), 1)
            for path, found in pages.items()
        },
        "rss_mb": round(used, 1),
        "rss_at_start_mb": round(started, 1),
        "status_user_s": round(shown, 3),
        "imports_user_s": round(imports, 3),
        "tasks": count,
        "requests": requests,
    }


def main() -> None:
    options = measurement.parser("web", __doc__)
    options.add_argument("--tasks", type=int, default=100_000)
    options.add_argument("--requests", type=int, default=500)
    given = options.parse_args()
    before = measurement.machine()
    count, requests = (2_000, 50) if given.quick else (given.tasks, given.requests)
    with measurement.folders(given.dir) as (_, folder):
        result = run(folder, count, requests)
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
