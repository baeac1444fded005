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


class Agent:
    """A genuine AgentScope agent that is asked one question after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def agentscope(server: str, traces: str | None = None, **wanted: Any) -> Iterator[Agent]:
    """An agent in a process of its own. All its spans have been sent when the context ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.agents.agentscope_agent", json.dumps(wanted)],
        env=environment(server, traces),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        yield Agent(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
