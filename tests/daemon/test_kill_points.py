"""Kill -9 at every step of ingestion, while the sources are written: every reply once, every task once."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.daemon.following import killed_at
from tests.daemon.killed import POINTS
from tests.factories.config import write_config
from tests.factories.state import execute
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all
from tests.sources.studio.writer import empty_like

ROOT = Path(__file__).parents[2]
AGENTS = {"old": "spanKind = 'AGENT'", "new_v1": "operationName = 'invoke_agent'"}
KILLS = 3
"""At each point, for each seed."""


@contextlib.contextmanager
def filled(path: Path, name: str, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that fills a source until its input is closed."""
    command = [sys.executable, "-m", "tests.daemon.filling", str(path), name, str(seed)]
    with warm.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def flywheel(*arguments: str) -> dict[str, Any]:
    done = warm.run(
        [sys.executable, "-m", "flywheel", *arguments, "--json"], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_kill_at_any_point_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    databases = {name: empty_like(name, tmp_path / f"{name}.sqlite") for name in AGENTS}
    lines = tmp_path / "lines.jsonl"
    lines.touch()
    sources = [*({"path": str(path)} for path in databases.values()), {"type": "jsonl", "path": str(lines)}]
    # One seed also gives traces up whose agents have not come yet: they are told again when those come.
    ingest = {"settle_seconds": 0.05, "abandon_seconds": 3600 if seed == 2 else 1e8}
    config = write_config(tmp_path, sources=sources, ingest=ingest)
    state = tmp_path / "state" / "state.db"
    kills = [(point, chance.randint(1, 12)) for point in POINTS for _ in range(KILLS)]
    chance.shuffle(kills)
    with contextlib.ExitStack() as stack:
        fillers = [
            stack.enter_context(filled(path, name, seed)) for name, path in (*databases.items(), ("jsonl", lines))
        ]
        for point, arrival in kills:
            killed_at(config, point, arrival)
            assert state.exists()
            assert all(filler.poll() is None for filler in fillers), "a writer failed"
        for filler in fillers:
            filler.stdin.close()
        assert [filler.wait(timeout=120) for filler in fillers] == [0, 0, 0]

    report = flywheel("ingest", "-c", str(config))
    books = flywheel("audit", "-c", str(config))
    assert books["balanced"], books["problems"]
    assert books["dead"] == 0

    told = Counter(execute(state, "SELECT path, span_id FROM replies, sources WHERE sources.id = source_id"))
    expected: set[tuple[str, str]] = set()
    for name, path in databases.items():
        replies = by_id(read_all(path, now=MUCH_LATER)[0])
        agents = {span for (span,) in execute(path, f"SELECT id FROM span_table WHERE {AGENTS[name]}")}
        assert len(agents) > 100
        assert agents <= replies.keys()
        expected |= {(str(path), span) for span in replies}
    questions = [json.loads(line)["main_query"] for line in lines.read_text().splitlines()]
    from_databases = Counter({key: count for key, count in told.items() if key[0] != str(lines)})
    assert from_databases == Counter(expected)
    assert told.total() - from_databases.total() == len(questions) == len(set(questions))
    assert sum(source["replies"] for source in report["sources"]) == told.total() == books["replies"]

    tasks = [json.loads(line) for line in (tmp_path / "state" / "tasks.jsonl").read_text().splitlines()]
    exported = Counter(task["task_id"] for task in tasks)
    assert set(exported.values()) == {1}
    stored = {json.loads(payload)["task_id"] for (payload,) in execute(state, "SELECT payload FROM tasks")}
    assert exported.keys() == stored
    asked = Counter(task["main_query"] for task in tasks)
    assert all(asked[question] == 1 for question in questions)
    # The same as a state that was never disturbed.
    clean = write_config(tmp_path, name="clean.yaml", state={"dir": "clean"}, sources=sources, ingest=ingest)
    flywheel("ingest", "-c", str(clean))
    ends = "SELECT span_id, replies.state, skip_reason, tasks.key FROM replies LEFT JOIN tasks ON tasks.id = task_id"
    assert sorted(map(str, execute(state, ends))) == sorted(map(str, execute(tmp_path / "clean" / "state.db", ends)))
