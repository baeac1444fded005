"""Loading adapters at vLLM's own endpoint: only directories of safetensors, and only as many as there are slots for.

Requests have been authenticated with the admin key.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from flywheel.serving import routes
from flywheel.serving.adapter_files import unsafe_weights
from flywheel.serving.environment_variables import MAX_ADAPTERS_VARIABLE
from flywheel.serving.server.asgi import parsed, with_body
from flywheel.system.server_limits import App, Message, Receive, RefusedError, Scope, Send, read_body

MAX_BYTES = 65536


class AdapterSlots:
    def __init__(self, app: App, most: int | None) -> None:
        """`most` adapters can be loaded at the same time; None: any number."""
        self._app = app
        self.most = most
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    def of_environment(cls, app: App) -> AdapterSlots:
        most = os.environ.get(MAX_ADAPTERS_VARIABLE)
        return cls(app, int(most) if most else None)

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to vLLM if the adapter is a directory of safetensors and a slot is free for it. Raises
        RefusedError.

        vLLM itself would load pickled weights, and would look for other names on the hub. With more adapters than
        slots it would move weights at each request, and on a CPU, where the last slot must stay empty, answer
        requests for the base model with an adapter.
        """
        body = await read_body(receive)
        if body is None:
            return
        wanted = parsed(body, MAX_BYTES)
        path = wanted.get("lora_path") if isinstance(wanted, dict) else None
        if not isinstance(path, str) or "\0" in path:
            raise RefusedError(400, "expected {lora_name, lora_path}, both texts")
        try:
            if not await asyncio.to_thread(Path(path).is_dir):
                raise RefusedError(404, f"No adapter found for {path}")
            why = await asyncio.to_thread(unsafe_weights, Path(path))
        except OSError as error:
            why = f"{error.filename or path} cannot be read: {error.strerror or error}"
        if why:
            raise RefusedError(400, f"the adapter is refused: {why}")
        async with self._one_at_a_time:
            if self.most is not None:
                loaded = await self._loaded(scope)
                if wanted.get("lora_name") not in loaded and len(loaded) >= self.most:
                    raise RefusedError(409, f"all {self.most} slots for adapters are taken: {', '.join(loaded)}")
                await _free_slots(scope)
            await with_body(self._app, scope, body, receive, send)

    async def _loaded(self, scope: Scope) -> list[str]:
        """The names of vLLM's adapters, from its own list of models."""
        answer: list[bytes] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def kept(message: Message) -> None:
            answer.append(message.get("body", b""))

        path = str(scope["path"]).replace(routes.LOAD_ADAPTER, routes.MODELS)
        await self._app({**scope, "method": "GET", "path": path}, nothing, kept)
        return [str(card["id"]) for card in json.loads(b"".join(answer))["data"] if card.get("parent")]


async def _free_slots(scope: Scope) -> None:
    """Take adapters out of the engine that were unloaded: vLLM 0.32 only forgets their names, and their weights keep
    a slot. At the next load, rather than at once, requests in flight have long ended."""
    state: Any = getattr(scope.get("app"), "state", None)
    engine, models = getattr(state, "engine_client", None), getattr(state, "openai_serving_models", None)
    if engine is not None and models is not None:
        named = {request.lora_int_id for request in models.lora_requests.values()}
        for number in set(await engine.list_loras()) - named:
            await engine.remove_lora(number)
