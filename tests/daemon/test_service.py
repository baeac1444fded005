"""`flywheel run` as a process: it follows a live database, survives bad neighbours, and stops in order."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.factories.daemon import SOON, Daemon, wait_for
from tests.factories.judge_server import JudgeServer
from tests.sources.studio.writer import empty_like, insert, labels, rows


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
        commits = list(in_commits("new_v2"))
        for commit in commits[: len(commits) // 2]:
            insert(live, commit)
        wait_for(daemon.lines, "tasks of what is there")
        for commit in commits[len(commits) // 2 :]:
            insert(live, commit)
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

        # The late source is there at once, so that one pass finds many.
        wait_for(lambda: sum(map(int, told())) > len(expected) + 50, "the lines of the passes")
        assert len(told()) <= len(expected) + 25

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
    with JudgeServer() as judge:
        judge.hold(after=5)
        daemon = make(judge, source)
        process = daemon.start()
        wait_for(lambda: judge.in_flight == 4 and judge.calls == 9, "judge calls")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in daemon.log(), "the signal to be heard")
        judge.let_go()
        assert process.wait(SOON) == 0
        paid = judge.calls
        assert daemon.judged() >= paid, "what was paid for is stored"
        books = daemon.ask("audit")
        assert books["balanced"]
        assert books["task_states"].get("judging", 0) == 0
        assert books["pending"] > 0
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
    with JudgeServer() as judge:
        judge.hold()
        daemon = make(judge, source)
        process = daemon.start()
        wait_for(lambda: judge.in_flight == 4, "judge calls")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in daemon.log(), "the first signal to be heard")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: process.poll() is not None, "the end")
        assert judge.in_flight == 4, "it did not wait for the judge"
    assert daemon.ask("audit")["balanced"]
