"""Replies in traces of Studio whose model calls a server has recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flywheel.config.file import Config, load
from flywheel.records.request_id import new_request_id
from flywheel.serving.calls.call_log import RecordedCall
from tests.factories.config import write_config
from tests.factories.model_call import REMINDER, marked
from tests.sources.calls.log_server import LogServer
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user
from tests.sources.studio.writer import agent, message, part
from tests.sources.studio.writer import chat as model_call


def asked(number: int) -> list[dict[str, Any]]:
    """What the agent sends; its trace does not show the last message."""
    return [{"role": "system", "content": "You do sums."}, user(f"What is {number} + 1?"), user(REMINDER)]


def call(number: int, mark: str) -> RecordedCall:
    answer = completion(assistant(str(number + 1)), usage={"prompt_tokens": 9, "completion_tokens": 2})
    return recorded(chat(asked(number), temperature=0.5), answer, request_id=mark)


def mark_of(version: str = "my-agent@r0001") -> str:
    return new_request_id("0" * 16, version)


def trace(number: int, mark: str, *, ago: float = 0.0) -> list[dict[str, Any]]:
    """The rows of one reply, which ended so many seconds ago."""
    question = f"What is {number} + 1?"
    shown = [message("system", part("You do sums.")), message("user", part(question)), message("assistant")]
    about = {"trace": f"trace-{number}", "conversation": f"conversation-{number}"}
    rows = [
        marked(model_call(f"c{number}", shown, str(number + 1), parent=f"a{number}", **about), mark),
        agent(f"a{number}", f"What is {number} + 1?", str(number + 1), **about),
    ]
    end = time.time_ns() - int(ago * 1e9)
    times = {"startTimeUnixNano": str(end - 1_000_000), "endTimeUnixNano": str(end)}
    return [row | times for row in rows]


def config_of(folder: Path, *servers: LogServer, **more: Any) -> Config:
    defaults = {"model": {"alias": "my-agent"}, "sources": [{"path": str(folder / "studio.sqlite")}]}
    serving = {"urls": [server.url for server in servers], "call_log": {"keep_days": 10_000}}
    ingest = {"settle_seconds": 0, **more.pop("ingest", {})}
    return load(write_config(folder, **{**defaults, "serving": serving, "ingest": ingest, **more}))
