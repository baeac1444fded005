"""A daemon as a process, and in this one: what it is asked, and the workers that it has started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from flywheel.config.file import Config
from flywheel.daemon.service import Service
from flywheel.system.lock import instance_lock
from tests import waiting, warm
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute, running_daemon
from tests.waiting import until

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
        return ask(self.config, command)

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


def workers(folder: Path) -> list[int]:
    """The processes of workers below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if b"flywheel.training.worker" in line and str(folder).encode() in line:
            found.append(int(path.parent.name))
    return found


def ask(config: Path, command: str) -> dict[str, Any]:
    """What a command prints as JSON, whatever its exit code."""
    done = warm.run(
        [sys.executable, "-m", "flywheel", command, "--json", "-c", str(config)],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[Service, httpx2.AsyncClient]]:
    """A daemon in this process, and a client of its metrics."""
    with instance_lock(config.state_dir):
        async with running_daemon(config) as service:
            host, port = await until(lambda: service.metrics.address, "the metrics server")
            async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=SOON) as client:
                yield service, client
