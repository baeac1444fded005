"""The ingestion benchmarks run, print one object with their keys, and refuse to time a wrong result."""

from __future__ import annotations

import dataclasses
import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ingest, measurement
from benchmarks.databases import cached
from benchmarks.templates import Talk
from benchmarks.writer import Writer, copy

ROOT = Path(__file__).parent.parent.parent
SHARED = {"spans": int, "schema": str}
KEYS: dict[str, dict[str, type]] = {
    "ingest": {
        "cold_vs_floor": float,
        "ingest_vs_floor": float,
        "rss_growth_mb": float,
        "replies": int,
        "tasks": int,
        **SHARED,
    },
    "poll": {"idle_ms": float, "new100_ms": float, "size_ratio": float, "longest_read_ms": float, **SHARED},
    "latency": {
        "commit_to_task_ms_p50": float,
        "commit_to_task_ms_p99": float,
        "idle_commit_to_task_ms_p50": float,
        "replies": int,
        **SHARED,
    },
    "peer": {"cold_vs_peer": float, "second_vs_peer": float, "tasks": int, "peer_tasks": int, **SHARED},
}
PEER = """
import json, sqlite3
from pathlib import Path

class TracingReader:
    def __init__(self, settings):
        print("a parser's chatter")
        settings = settings.feedback_tracing
        database = sqlite3.connect(settings["base_url"])
        self.rows = database.execute("SELECT id FROM span_table WHERE name = ?", [NAME]).fetchall()
        database.close()
        Path(settings["train_output_path"]).write_text(json.dumps(self.rows))

    def get_training_tasks(self):
        return self.rows

    def get_validation_tasks(self):
        return []
"""


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def check(name: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    wanted = KEYS[name]
    assert {key: type(result.get(key)) for key in wanted} == wanted
    assert all(result[key] >= 0 for key, kind in wanted.items() if kind is not str)
    return result


def peer(folder: Path, name: str) -> Path:
    """A checkout that looks like AgentJet's to the benchmark."""
    package = folder / "ajet" / "task_reader" / "tracing_reader"
    package.mkdir(parents=True)
    (package / "connector.py").write_text("")
    (package / "__init__.py").write_text(f"NAME = {name!r}\n{PEER}")
    (folder / "ajet" / "__init__.py").write_text("raise ImportError('the whole trainer')")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["ingest", pytest.param("poll", marks=pytest.mark.extended), pytest.param("latency", marks=pytest.mark.long)],
)
def test_keys_and_types(name: str, tmp_path: Path) -> None:
    check(name, run(name, "--json", "--dir", str(tmp_path)))
    left = [path.name for path in tmp_path.iterdir()]
    assert left and all(name.startswith("studio-") for name in left), "only the databases are kept"


@pytest.mark.long
@pytest.mark.slow
def test_people_see_the_machine_too(tmp_path: Path) -> None:
    done = run("ingest", "--spans", "300", "--schema", "old")
    assert "cold_vs_floor" in done.stdout
    assert "python 3." in done.stdout and "sqlite 3." in done.stdout


@pytest.mark.slow
@pytest.mark.extended
def test_peer_reads_what_ours_reads(tmp_path: Path) -> None:
    result = check("peer", run("peer", "--json", "--peer", str(peer(tmp_path, "ReActAgent.reply"))))
    assert result["tasks"] == result["peer_tasks"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_peer_that_finds_nothing_is_no_comparison(tmp_path: Path) -> None:
    done = run("peer", "--json", "--peer", str(peer(tmp_path, "invoke_agent Solver")))
    assert done.returncode == 1
    assert "the peer found 0 tasks" in done.stderr


@pytest.mark.slow
def test_a_directory_without_the_peer(tmp_path: Path) -> None:
    done = run("peer", "--peer", str(tmp_path))
    assert done.returncode == 2
    assert "is no checkout of AgentJet" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_missed_reply_is_no_result(tmp_path: Path) -> None:
    made = cached(tmp_path, 300, "new")
    more = dataclasses.replace(made, truth=dataclasses.replace(made.truth, replies=made.truth.replies + 1))
    with pytest.raises(SystemExit, match="replies, tasks and dead rows"):
        ingest.compare(more, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["old", "new"])
def test_the_writer_adds_what_it_says(tmp_path: Path, schema: str) -> None:
    database = copy(cached(tmp_path, 300, schema), tmp_path, "copy")
    writer = Writer(database, seed=1)
    rows, runs, truth = writer.prepare(100)
    writer.commit(rows, runs)
    writer.close()
    assert len(rows) == truth.spans == 100
    assert truth.replies == truth.tasks > 0
    with sqlite3.connect(database.path) as found:
        assert found.execute("SELECT count(*) FROM span_table").fetchone() == (400,)
        assert found.execute("PRAGMA foreign_key_check").fetchall() == []
    found.close()


def test_no_dialogues_of_that_size() -> None:
    with pytest.raises(ValueError, match="no dialogues have 1 span"):
        Talk("old").draw(random.Random(0), 1)


def _grow(begin: Any, megabytes: int) -> int:
    begin()
    kept = bytearray(megabytes * 1024 * 1024)
    kept[::1024] = b"x" * len(kept[::1024])
    return len(kept)


def _fail(begin: Any) -> None:
    begin()
    sys.exit(3)


def test_memory_is_the_peak_above_the_start() -> None:
    measured = measurement.measure(_grow, 64)
    assert measured.value == 64 * 1024 * 1024
    assert 60 < measured.growth_mb < 80
    assert measured.seconds > 0


def test_a_process_that_fails_is_no_result() -> None:
    with pytest.raises(SystemExit, match="_fail failed"):
        measurement.measure(_fail)


def test_percentile() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert measurement.percentile(values, 0.5) == 51
    assert measurement.percentile(values, 0.99) == 100
    assert measurement.percentile([7.0], 0.99) == 7
