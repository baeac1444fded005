"""An application that answers like vLLM, and fails when it is told to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

from flywheel.system.server_limits import Receive, Scope, Send

EVENTS = [f"data: {at}\n\n".encode() for at in range(50)]


class Scripted:
    """Answers like vLLM with the ids that vLLM makes; streams when it is asked to; fails when it is told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.fails: Callable[[], None] = lambda: None
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.bodies.append(body)
        wanted = json.loads(body)
        headers = dict(scope["headers"])
        response_id = f"chatcmpl-{headers.get(b'x-request-id', b'none').decode()}"
        if scope["path"] == "/v1/responses":
            response_id = wanted["request_id"]
        kind = b"text/event-stream; charset=utf-8" if wanted.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]})
        if not wanted.get("stream"):
            self.fails()
            answer = {"id": response_id, "model": wanted["model"], "choices": [], "object": "chat.completion"}
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
            return
        left = asyncio.create_task(receive())
        for event in [f"data: {response_id}\n\n".encode(), *EVENTS]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            while not self.hold.is_set() and not left.done():
                await asyncio.sleep(0.005)
            if left.done():
                return
            self.fails()
        left.cancel()
        await send({"type": "http.response.body", "body": b""})
