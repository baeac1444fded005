"""`daemon.on_stop`: a stop of the daemon ends the worker of a round, or leaves it for the next daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flywheel.daemon import service
from flywheel.errors import EXIT_CONFIG, TrainError
from tests import waiting, warm
from tests.cli.conftest import Run
from tests.conftest import POLICY
from tests.daemon.rounds.workers import REFUSES
from tests.factories.daemon import ask, workers

SOON = 120.0
wait_for = partial(waiting.wait_for, seconds=SOON)
PROGRAM = """
import sys
from flywheel.cli import main
from flywheel.daemon import service
sys.executable = {worker!r}
service.in_container = lambda: False
main()
"""


@pytest.fixture
def go_on(tmp_path: Path) -> Iterator[Path]:
    """The file that a worker waits for."""
    path = tmp_path / "go-on"
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\nwhile [ ! -e {path} ]; do sleep 0.1; done; {REFUSES}\n")
    worker.chmod(0o755)
    yield path
    for pid in workers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    code = PROGRAM.format(worker=str(config.with_name("worker")))
    with log.open("wb") as stderr:
        return warm.Popen([sys.executable, "-c", code, "run", "-c", config], stderr=stderr)


def live_round(config: Path) -> Any:
    return ask(config, "status")["live_round"]


def stop(daemon: subprocess.Popen[bytes], *numbers: signal.Signals) -> int:
    for number in numbers:
        daemon.send_signal(number)
    return daemon.wait(SOON)


@pytest.mark.slow
def test_a_worker_that_is_left_by_one_daemon_is_adopted_by_the_next(
    due_config: Callable[..., Path], go_on: Path, tmp_path: Path
) -> None:
    config = due_config(model={"base": str(POLICY)}, daemon={"on_stop": "detach", "metrics": None})
    daemon = start(config, tmp_path / "first.log")
    try:
        wait_for(lambda: (live_round(config) or {}).get("state") == "training", "the round")
        [pid] = workers(config.parent)
        # A second signal ends the daemon sooner, and the worker no more than the first.
        assert stop(daemon, signal.SIGTERM, signal.SIGINT) == 0
        assert f"r0001: its worker (process {pid}) keeps running" in (tmp_path / "first.log").read_text()
        assert workers(config.parent) == [pid]
        assert (live_round(config)["state"], live_round(config)["attempt"]) == ("training", 1)

        log = tmp_path / "second.log"
        daemon = start(config, log)
        wait_for(
            lambda: f"resuming with the worker of an earlier daemon (process {pid})" in log.read_text(),
            "the adoption",
        )
        go_on.touch()
        wait_for(lambda: "r0001 is rejected: no spread" in log.read_text(), "its result")
        assert stop(daemon, signal.SIGTERM) == 0
    finally:
        daemon.kill()
        daemon.wait()
    [row] = ask(config, "status")["rounds"]
    assert (row["round"], row["state"]) == ("r0001", "rejected")


@pytest.mark.slow
def test_by_default_no_worker_outlives_the_daemon(
    due_config: Callable[..., Path], go_on: Path, tmp_path: Path
) -> None:
    config = due_config(model={"base": str(POLICY)}, daemon={"metrics": None})
    daemon = start(config, tmp_path / "log")
    try:
        wait_for(lambda: workers(config.parent), "the worker")
        assert stop(daemon, signal.SIGTERM) == 0
    finally:
        daemon.kill()
        daemon.wait()
    assert workers(config.parent) == []
    assert live_round(config)["state"] == "planned"


def test_a_container_is_refused_a_worker_that_outlives_the_daemon(
    flywheel: Run, due_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(_: object) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr(service, "in_container", lambda: True)
    monkeypatch.setattr(service.Service, "recover", started)
    config = due_config(daemon={"on_stop": "detach", "metrics": None})
    flywheel("run", "-c", config).fails(EXIT_CONFIG, "daemon.on_stop: detach has no effect in a container")


@pytest.mark.parametrize(("mode", "is_told"), [("mixed", True), ("process", False), ("", False)])
def test_a_service_that_ends_the_worker_it_should_leave_is_told(
    flywheel: Run, due_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mode: str, *, is_told: bool
) -> None:
    async def started(_: object) -> None:
        raise TrainError("go on", "this is as far as the test goes")

    monkeypatch.setattr(service, "in_container", lambda: False)
    monkeypatch.setattr(service, "kill_mode", lambda: mode)
    monkeypatch.setattr(service.Service, "recover", started)
    ran = flywheel("run", "-c", due_config(daemon={"on_stop": "detach", "metrics": None}))
    assert "this is as far" in ran.err
    assert (f"KillMode={mode}" in ran.err and "detach.conf" in ran.err) is is_told
