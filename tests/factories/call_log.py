"""Recorded calls, and logs of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from flywheel.serving.calls.call_log import CallLog, RecordedCall


def call(request_id: str = "fw-1", request: bytes = b'{"model": "agent"}', **more: Any) -> RecordedCall:
    plain = RecordedCall(
        request_id=request_id,
        path="/v1/chat/completions",
        version="base",
        credential="c0ffee",
        retry=0,
        started_ns=1,
        ended_ns=2,
        status=200,
        is_complete=True,
        media_type="application/json",
        request=request,
        response=b'{"id": "chatcmpl-fw-1"}',
    )
    return replace(plain, **more)


def conversation(calls: int, seed: int = 0, **more: Any) -> list[RecordedCall]:
    """A conversation in which every call repeats all messages before it."""
    words = random.Random(seed)
    messages = [{"role": "system", "content": "You are an agent."}]
    told = []
    for at in range(calls):
        messages.append({"role": "user", "content": words.randbytes(1000).hex()})
        body = {"model": "agent", "messages": messages, "tools": [{"name": "t" * 4000}], "stream": True}
        told.append(call(f"fw-{seed}-{at}", json.dumps(body).encode(), response=words.randbytes(50), **more))
        messages.append({"role": "assistant", "content": words.randbytes(1000).hex()})
    return told


def stored(log: CallLog) -> list[RecordedCall]:
    return [each for _, each in log.page(0, 10**6, 10**9)]


def log_settings(path: Path, **more: float) -> dict[str, Any]:
    return {"path": str(path), "keep_days": 14, "max_bytes": 10**9, **more}
