"""Requests beside a running daemon, which may be killed before it carries them out."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import load
from flywheel.daemon import requests
from flywheel.store.requests import Request, RequestKind
from tests.factories.daemon import Daemon, wait_for
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute
from tests.sources.studio.writer import Studio, agent

BAD = {**agent("bad", trace="bad-trace", began=5, ended=6), "attributes": "{broken"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that reads a database with a bad row and a file with a bad line."""
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(agent("good", trace="good-trace"), BAD)
    (tmp_path / "lines.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": broken}\n')
    with JudgeServer() as judge:
        made = Daemon(tmp_path, judge, [studio.path, tmp_path / "lines.jsonl"])
        yield made
        made.stop()


def correct(folder: Path) -> None:
    corrected = agent("bad")["attributes"]
    execute(folder / "studio.sqlite", "UPDATE span_table SET attributes = ? WHERE spanId = 'bad'", corrected)
    correct_line(folder)


def correct_line(folder: Path) -> None:
    # In place: the length stays.
    path = folder / "lines.jsonl"
    path.write_text(path.read_text().replace('{"question": broken}', '{"question":"b?", "answer":"b"}'))


def ask(daemon: Daemon, kind: RequestKind, arguments: dict[str, Any]) -> Request:
    return asyncio.run(requests.perform(load(daemon.config), kind, arguments, "alice"))


def counts(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.rows("SELECT state, count(*) FROM dead_letters GROUP BY state"))


def attempts(daemon: Daemon) -> list[int]:
    return [count for (count,) in daemon.rows("SELECT attempts FROM dead_letters WHERE state = 'open'")]


def hang(daemon: Daemon) -> subprocess.Popen[str]:
    """Stop the daemon's process at a moment at which it does not write."""
    assert daemon.process is not None

    def is_stopped() -> bool:
        daemon.process.send_signal(signal.SIGSTOP)
        # Until all of its threads have stopped, one of them may begin to write.
        os.waitpid(daemon.process.pid, os.WUNTRACED)
        with closing(sqlite3.connect(daemon.state / "state.db", timeout=0.2, isolation_level=None)) as conn:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                daemon.process.send_signal(signal.SIGCONT)
                return False
        return True

    wait_for(is_stopped, "a daemon that does not write")
    return daemon.process


@pytest.mark.slow
def test_a_running_daemon_retries_rows_and_lines(daemon: Daemon) -> None:
    daemon.start()
    wait_for(lambda: counts(daemon).get("open") == 2, "two dead letters")
    done = ask(daemon, RequestKind.RETRY, {"ids": None})
    assert sorted(each["next"] for each in done.result["retried"]) == ["read", "reread"]
    wait_for(lambda: attempts(daemon) == [2, 2], "both being read again, in vain")
    correct(daemon.folder)
    assert ask(daemon, RequestKind.RETRY, {"ids": None}).error is None
    wait_for(lambda: daemon.judged() == 4, "the verdicts on all four replies")
    assert counts(daemon) == {"retried": 2}
    assert daemon.ask("audit")["balanced"]


@pytest.mark.slow
def test_a_kill_before_it_is_carried_out_neither_loses_nor_repeats_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "WAIT_SECONDS", 1.0)
    daemon.start()
    wait_for(lambda: counts(daemon).get("open") == 2, "two dead letters")
    process = hang(daemon)
    # Not the row: the next daemon finds a row that was changed by itself, if the first had not yet looked for such.
    correct_line(daemon.folder)
    [(line,)] = daemon.rows("SELECT id FROM dead_letters WHERE subject LIKE 'line %'")
    waiting = ask(daemon, RequestKind.RETRY, {"ids": [line]})
    assert waiting.state == "open"
    assert counts(daemon) == {"open": 2}
    process.send_signal(signal.SIGKILL)
    process.wait()
    daemon.start()
    wait_for(lambda: counts(daemon) == {"open": 1, "retried": 1}, "the retry")
    wait_for(lambda: daemon.judged() == 3, "the verdicts")
    assert daemon.rows("SELECT state, requested_by FROM requests") == [("done", "alice")]
    assert len(daemon.rows("SELECT id FROM events WHERE kind = 'dead_letters' AND new = 'retried'")) == 1
    assert daemon.ask("audit")["balanced"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RequestKind.RELEASE, RequestKind.REJECT, RequestKind.LABEL, RequestKind.DROP])
def test_the_others_do_not_wait_for_a_daemon_that_hangs(daemon: Daemon, kind: RequestKind) -> None:
    daemon.start()
    wait_for(lambda: daemon.judged() == 2, "two verdicts")
    wait_for(lambda: counts(daemon).get("open") == 2, "two dead letters")
    hang(daemon)
    key = daemon.lines()[0]["task_id"]
    arguments = {
        RequestKind.RELEASE: {"tasks": None}, RequestKind.REJECT: {"tasks": None}, RequestKind.DROP: {"ids": None},
        RequestKind.LABEL: {"task_id": key, "label": "reject"},
    }  # fmt: skip
    assert ask(daemon, kind, arguments[kind]).state == "done"
