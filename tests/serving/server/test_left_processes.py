"""Processes that outlive their server: recognised by their environment, named, and ended by the next start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flywheel.config.file import Config
from flywheel.serving.server import vllm_command
from flywheel.serving.server.left_processes import left_processes
from tests.conftest import serve_config
from tests.waiting import wait_for

SERVER = """
import importlib.util, os, signal, subprocess, sys
from pathlib import Path
from flywheel.serving.server.left_processes import environment
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
if importlib.util.find_spec("setproctitle"):
    code += "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); "
code += "print(1, flush=True); time.sleep(600)"
engine = [sys.executable, "-c", code]
child = "import os, subprocess, sys; "
child += "e = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True); "
child += "e.stdout.readline(); print(e.pid, flush=True); sys.stdin.read()"
os.execve(sys.executable, [sys.executable, "-c", child, *engine], {**os.environ, **environment(Path(sys.argv[1]))})
"""
"""Becomes another program, as `flywheel serve` becomes vLLM, which starts an engine that ignores SIGTERM
and, as vLLM's does, overwrites its title."""

Start = Callable[[Path], tuple[subprocess.Popen[str], int]]


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server of a state; returns it and the process id of its engine."""
    begun: list[tuple[subprocess.Popen[str], int]] = []

    def starting(state: Path) -> tuple[subprocess.Popen[str], int]:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        begun.append((server, int(server.stdout.readline())))
        return begun[-1]

    yield starting
    for server, engine in begun:
        for pid in (server.pid, engine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.communicate()


@pytest.fixture
def config(tmp_path: Path, free_port: int) -> Config:
    return serve_config(tmp_path / "state", free_port)


def killed(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait(30)


@pytest.mark.slow
@pytest.mark.training
def test_what_a_killed_server_leaves_is_named_and_then_ended(
    config: Config,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, engine = start(config.state_dir)
    living, its_engine = start(config.state_dir)
    other, engine_of_another_state = start(tmp_path / "other")
    killed(server)
    killed(other)
    assert [(left.process.pid, left.server) for left in left_processes(config.state_dir)] == [(engine, server.pid)]

    monkeypatch.setattr("flywheel.serving.server.left_processes.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    vllm_command.serve(config)
    assert f"process {engine} was left by the server {server.pid}" in caplog.text
    wait_for(lambda: not is_there(engine), "the engine's end", seconds=60)
    assert is_there(living.pid) and is_there(its_engine)
    assert is_there(engine_of_another_state), "it belongs to another state"
    assert list(left_processes(config.state_dir)) == []


@pytest.mark.slow
def test_a_process_id_that_was_given_to_another_process_is_no_server(config: Config, start: Start) -> None:
    """Here that of this test, which has not the server's mark."""
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    mark = {
        "FLYWHEEL_SERVER_STATE": os.path.realpath(config.state_dir),
        "FLYWHEEL_SERVER_PROCESS": f"{os.getpid()} abc",
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env={**os.environ, **mark}, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [left.process.pid for left in left_processes(config.state_dir)] == [process.pid]
        process.kill()
    assert list(left_processes(config.state_dir)) == []
