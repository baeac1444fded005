"""A scripted model behind the real middleware with its call log, and who reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.serving.client.replica_client import Replica
from flywheel.store import placed_calls
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.factories.config import make_config

Json = dict[str, Any]


class Server:
    """A scripted model behind the real middleware with its call log, and what arrived before that."""

    def __init__(self, model: ScriptedModel, recorder: Recorder, url: str) -> None:
        self.model = model
        self.url = url
        self._recorder = recorder

    @property
    def requests(self) -> list[Json]:
        return self._recorder.requests

    async def point(self, adapter: str) -> None:
        """Let the alias be answered by an adapter."""
        async with Replica(self.url) as replica:
            await replica.point("my-agent", adapter, None)


def configuration(directory: Path, server: Server, *sources: Json, **ingest: Any) -> Config:
    return make_config(
        directory,
        sources=list(sources),
        serving={"urls": [server.url]},
        model={"alias": "my-agent", "base": "tiny"},
        ingest={"settle_seconds": 0.2, "poll_seconds": 0.2, **ingest},
    )


def end_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies that wait for their traces have waited for `LONG_WAIT`."""
    due, waited_ns = placed_calls.due, int(LONG_WAIT["calls_wait_seconds"] * 1e9)
    monkeypatch.setattr(placed_calls, "due", lambda conn, now_ns, limit: due(conn, now_ns + waited_ns, limit))


def exported(config: Config) -> list[Json]:
    """The task file, in the order of the replies."""
    if not config.task_file.exists():
        return []
    whole, _, _ = config.task_file.read_bytes().rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return sorted(lines, key=lambda line: line["metadata"]["started_at"])


OTLP: Json = {"type": "otlp", "listen": "127.0.0.1:0"}
CALLS: Json = {"type": "calls"}
LONG_WAIT: Json = {"calls_wait_seconds": 3600.0}
"""However busy the machine, each trace has its calls by then, and is told before they are told without it."""
