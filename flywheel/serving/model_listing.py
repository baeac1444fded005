"""Adds the aliases to the list of models."""

from __future__ import annotations

import json
from collections.abc import Mapping

from flywheel.serving.alias_table import Target
from flywheel.serving.asgi import Message, Send

OWNER = "flywheel"
"""`owned_by` of the aliases."""


def listing(send: Send, targets: Mapping[str, Target], created: int) -> Send:
    """A `send` that buffers the list of models and adds the aliases to it.

    `created` is their creation time in seconds since 1970.
    """
    start: Message = {}
    parts: list[bytes] = []

    async def held(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        if message["type"] != "http.response.body":
            return await send(message)
        parts.append(message.get("body", b""))
        if message.get("more_body"):
            return
        body = b"".join(parts)
        if start["status"] == 200:
            body = _with_aliases(body, targets, created)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return held


def _with_aliases(body: bytes, targets: Mapping[str, Target], created: int) -> bytes:
    try:
        found = json.loads(body)
        found["data"] += [
            {"id": alias, "object": "model", "created": created, "owned_by": OWNER, "root": target.name}
            for alias, target in targets.items()
        ]
        return json.dumps(found).encode()
    except (ValueError, KeyError, TypeError):
        return body
