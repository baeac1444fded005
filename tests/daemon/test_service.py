"""`flywheel run` as a process: it follows a live database, survives bad neighbours, and stops in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import waiting, warm
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute
from tests.sources.studio.writer import empty_like, insert, labels, rows

SOON = 180.0
wait_for = partial(waiting.wait_for, seconds=SOON)


class Daemon:
    """The process and its configuration."""

    def __init__(self, folder: Path, judge: JudgeServer, sources: list[Path]) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.config = write_config(
            folder,
            sources=[
                {"path": str(path), "type": "jsonl" if path.suffix == ".jsonl" else "studio"} for path in sources
            ],
            ingest={"settle_seconds": 0.2, "poll_seconds": 0.5},
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": 4},
            serving={"urls": ["http://127.0.0.1:9"]},
            trigger={"min_samples": 100_000},
            daemon={"drain_seconds": 20},
        )
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "flywheel", "run", "-c", str(self.config)]
        log = (self.folder / "daemon.log").open("a")
        self.process = warm.Popen(command, stderr=log, text=True)
        log.close()
        wait_for(lambda: "watching" in self.log() or self.process.poll() is not None, "the daemon's start")  # type: ignore[union-attr]
        return self.process

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    def ask(self, command: str) -> dict[str, Any]:
        done = warm.run(
            [sys.executable, "-m", "flywheel", command, "--json", "-c", str(self.config)],
            capture_output=True, text=True, timeout=SOON, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def lines(self) -> list[dict[str, Any]]:
        """The last line may just be being written."""
        path = self.state / "tasks.jsonl"
        whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        return [json.loads(line) for line in whole.splitlines()]

    def judged(self) -> int:
        return len(self.rows("SELECT id FROM verdicts WHERE outcome != 'undecided'"))

    def rows(self, query: str) -> list[Any]:
        """Of the state; none before there is one."""
        return execute(self.state / "state.db", query) if (self.state / "state.db").exists() else []

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def make(judge: JudgeServer, *sources: Path) -> Daemon:
        made.append(Daemon(tmp_path, judge, list(sources)))
        return made[-1]

    yield make
    for daemon in made:
        daemon.stop()


def in_commits(name: str) -> list[list[tuple[Any, ...]]]:
    """The rows of a fixture in commits of 40, as an exporter sends them: traces are cut in two."""
    every = rows(name)
    return [every[start : start + 40] for start in range(0, len(every), 40)]


@pytest.mark.slow
def test_a_live_database_is_followed_beside_a_bad_one(tmp_path: Path, make: Callable[..., Daemon]) -> None:
    live = empty_like("new_v2", tmp_path / "live.sqlite")
    (tmp_path / "bad.sqlite").write_bytes(b"not a database at all " * 100)
    with JudgeServer() as judge:
        daemon = make(judge, live, tmp_path / "bad.sqlite", tmp_path / "later.sqlite")
        process = daemon.start()
        assert daemon.ask("status")["daemon"]["pid"] == process.pid

        def failing() -> set[str]:
            return {Path(source["path"]).name for source in daemon.ask("status")["sources"] if source["error"]}

        wait_for(lambda: failing() == {"bad.sqlite", "later.sqlite"}, "the sources' errors")
        for commit in in_commits("new_v2"):
            insert(live, commit)
            time.sleep(0.1)
        expected = {
            label["span_id"]
            for label in labels("new_v2")
            if label["user_visible"] and label["answer_in_span"] and label["kind"] != "interrupted"
        }
        wait_for(lambda: len(daemon.lines()) >= len(expected), "the tasks")
        wait_for(lambda: daemon.judged() >= len(expected), "the verdicts")
        lines = daemon.lines()
        assert {line["metadata"]["span_id"] for line in lines} == expected
        assert len(lines) == len(expected)

        # A source that appears later is read without a restart.
        late = empty_like("old", tmp_path / "later.tmp")
        insert(late, rows("old"))
        late.rename(tmp_path / "later.sqlite")
        wait_for(lambda: len(daemon.lines()) > len(expected) + 50, "the late source's tasks")
        assert "Traceback" not in daemon.log()

        # One line for each pass, and none for each reply.
        def told() -> list[str]:
            return re.findall(r"(\d+) new tasks; judged \d+: ", daemon.log())

        wait_for(lambda: sum(map(int, told())) >= len(expected), "the lines of the passes")
        assert len(told()) < len(expected)

        second = warm.run(
            [sys.executable, "-m", "flywheel", "run", "-c", str(daemon.config)],
            capture_output=True,
            timeout=SOON,
            check=False,
        )
        assert second.returncode == 75

        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
    books = daemon.ask("audit")
    assert books["balanced"]
    assert books["task_states"].get("judging", 0) == 0
    assert daemon.ask("status")["daemon"]["pid"] is None


@pytest.mark.slow
def test_a_stop_waits_for_calls_in_flight_and_a_restart_goes_on(tmp_path: Path, make: Callable[..., Daemon]) -> None:
    source = empty_like("new_v1", tmp_path / "studio.sqlite")
    insert(source, rows("new_v1"))
    with JudgeServer(delay_seconds=1.0) as judge:
        daemon = make(judge, source)
        process = daemon.start()
        wait_for(lambda: judge.in_flight == 4 and judge.calls > 4, "judge calls")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
        paid = judge.calls
        assert daemon.judged() >= paid, "what was paid for is stored"
        books = daemon.ask("audit")
        assert books["balanced"]
        assert books["task_states"].get("judging", 0) == 0
        assert books["pending"] > 0
        judge.delay_seconds = 0.0
        process = daemon.start()
        # A look at a state that a process begins to write just then says so instead.
        wait_for(lambda: daemon.ask("audit").get("pending") == 0, "the rest")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
        # A check that needs no model saves some calls; what was called is what was stored.
        assert judge.calls == daemon.ask("status")["judge"]["usage"]["calls"]
        assert judge.calls <= sum(1 for line in daemon.lines() if line["answer"].strip())


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path, make: Callable[..., Daemon]) -> None:
    source = empty_like("new_v1", tmp_path / "studio.sqlite")
    insert(source, rows("new_v1"))
    with JudgeServer(delay_seconds=15.0) as judge:
        daemon = make(judge, source)
        process = daemon.start()
        wait_for(lambda: judge.in_flight == 4, "judge calls")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in daemon.log(), "the first signal to be heard")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: process.poll() is not None, "the end")
        assert judge.in_flight == 4, "it did not wait for the judge"
    assert daemon.ask("audit")["balanced"]
