"""Runs genuine agents as programs of their own against a server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def environment(server: str, traces: str | None = None) -> dict[str, str]:
    """The environment of an agent. `server` is its model's address, `traces` that of the OTLP receiver."""
    given = {**os.environ, "OPENAI_BASE_URL": f"{server}/v1", "OPENAI_API_KEY": "unused"}
    if traces is None:
        return {**given, "OTEL_SDK_DISABLED": "true"}
    return {**given, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": traces}


def run(program: Path, *arguments: str, server: str, traces: str | None = None) -> list[str]:
    """What a Python program prints, by line."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment(server, traces),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Agents:
    """Genuine AgentScope agents, one after another, in a process of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, *, stream: bool, tools: bool) -> None:
        """Make a new agent, with a conversation of its own."""
        self._tell({"agent": {"stream": stream, "tools": tools}})

    def ask(self, question: str) -> str:
        assert self._process.stdout is not None
        self._tell({"ask": question})
        return self._process.stdout.readline().strip()

    def _tell(self, what: Any) -> None:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def agentscope(server: str, traces: str | None = None) -> Iterator[Agents]:
    """All spans have been sent when the context ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.agents.agentscope_agent"],
        env=environment(server, traces),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        yield Agents(process)
        process.stdin.close()
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
