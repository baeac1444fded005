"""The management endpoints: reading and setting the alias at /flywheel/alias, pages of the call log at
/flywheel/calls, and checking adapters before loading.

Requests have been authenticated with the admin key.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from flywheel.adapter_files import unsafe_weights
from flywheel.serving import routes
from flywheel.serving.alias_table import AliasTable, Target, TargetMismatchError
from flywheel.serving.asgi import App, Receive, RefusedError, Scope, Send, answer, read_body, route_path, with_body
from flywheel.serving.call_endpoint import CallEndpoint
from flywheel.serving.call_recorder import CallRecorder

MAX_BYTES = 65536


class Management:
    def __init__(self, aliases: AliasTable, instance: str, recorder: CallRecorder | None) -> None:
        self._aliases = aliases
        self._instance = instance
        self._calls = CallEndpoint(recorder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the middleware's own endpoints. Raises RefusedError."""
        path = route_path(scope)
        if path == routes.CALLS:
            return await self._calls(scope, send)
        if path != routes.ALIAS:
            raise RefusedError(404, f"there are only {routes.ALIAS} and {routes.CALLS}")
        if scope["method"] == "GET":
            await answer(send, 200, self._shown())
        elif scope["method"] == "PUT":
            body = await read_body(receive, MAX_BYTES)
            if body is not None:
                await self._point(_parsed(body), send)
        else:
            raise RefusedError(405, "GET shows the aliases, PUT sets one")

    def _shown(self) -> dict[str, Any]:
        targets = self._aliases.targets
        return {
            "aliases": {alias: target.name for alias, target in targets.items()},
            "paths": {target.name: target.path for target in targets.values() if target.path},
            "digests": {target.name: target.sha256 for target in targets.values() if target.sha256},
            "base_model": self._aliases.base_model,
            "instance": self._instance,
        }

    async def _point(self, wanted: Any, send: Send) -> None:
        try:
            alias, target = wanted["alias"], wanted["target"]
            path, sha256, expected = (wanted.get(key) for key in ("path", "sha256", "expected"))
            texts = isinstance(alias, str) and isinstance(target, str)
            if not (texts and all(isinstance(value, str | None) for value in (path, sha256, expected))):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise RefusedError(400, "expected {alias, target, path?, sha256?, expected?}, all texts") from None
        if not alias or not target or alias in (target, self._aliases.base_model):
            raise RefusedError(400, "an alias must have a name of its own")
        try:
            previous = await self._aliases.point(alias, Target(target, path, sha256), expected)
        except TargetMismatchError as mismatch:
            raise RefusedError(409, f"{alias} is {mismatch.current}") from None
        except OSError as error:
            raise RefusedError(500, f"the alias file cannot be written: {error}") from None
        await answer(send, 200, {"alias": alias, "target": target, "previous": previous})


async def load_adapter(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Pass the request to vLLM if the adapter is a directory of safetensors. Raises RefusedError.

    vLLM itself would load pickled weights, and would look for other names on the hub.
    """
    body = await read_body(receive, MAX_BYTES)
    if body is None:
        return
    wanted = _parsed(body)
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
    await with_body(app, scope, body, receive, send)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is no JSON, or nested too deeply") from None
