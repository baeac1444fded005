"""The middleware: pure ASGI, inside vLLM's API server (`--middleware`), so a swap costs no extra hop.

It authenticates requests (`authentication`) and replaces an alias in the `model` of a request by its present target
before the request reaches vLLM: a request in flight keeps its version, and the answer's `model`
and id name it. Requests to an alias are recorded (`call_recorder`). Answers are unchanged, except that the list of
models includes the aliases. `management_endpoints` reads and sets aliases, and `routes` lists the paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request

from flywheel.records.request_id import BASE_VERSION, mark_of, new_request_id
from flywheel.serving import routes
from flywheel.serving.calls.call_log import RecordedCall
from flywheel.serving.environment_variables import ALIAS_VARIABLE, BASE_VARIABLE, FILE_VARIABLE, ServerSettings
from flywheel.serving.server.alias_table import AliasTable, listed, not_found, unknown_model
from flywheel.serving.server.asgi import (
    changed,
    in_utf8,
    is_json,
    members,
    models_in,
    refuse,
    route_path,
    with_body,
    with_header,
)
from flywheel.serving.server.authentication import Access, Gate, credential
from flywheel.serving.server.call_recorder import CallRecorder, credential_of, retries_of
from flywheel.serving.server.callers import Caller, Exclusions, caller_of
from flywheel.serving.server.management_endpoints import AdapterSlots, Management
from flywheel.serving.server.sent_adapters import LIMIT, SECONDS, SentAdapters
from flywheel.serving.server.version_assignment import Assignment, assign
from flywheel.system.server_limits import (
    App,
    Limited,
    Message,
    Receive,
    RefusedError,
    Scope,
    Send,
    ServerLimits,
    header,
)

POLL_SECONDS = 0.05
BODIES_HELD: Final = 32
"""Bodies of this size that fit into memory at once: vLLM holds that of a request until it is answered."""


class Rewritten(NamedTuple):
    """`target` is the target of the alias in the request, None without an alias."""

    body: bytes
    target: str | None


def rewrite_model(
    body: bytes,
    resolve: Callable[[str, Mapping[str, msgspec.Raw]], str | None],
    request_id: Callable[[str], str] | None = None,
) -> Rewritten:
    """`body`, a JSON object, with another `model` if `resolve` returns one for its `members`.

    With `request_id`, a request to an alias gets the `request_id` that it returns for the target.

    Bodies that are not a JSON object in one of the server's encodings are returned unchanged: the server refuses
    them. Raises RefusedError as `models_in` does.
    """
    try:
        text = in_utf8(body)
        models, found = models_in(text), members(text)
    except ValueError:
        return Rewritten(body, None)
    targets = [resolve(model, found) if isinstance(model, str) else None for model in models]
    target = targets[-1] if targets else None
    if target is None:
        return Rewritten(body, None)
    added = {"model": target, **({"request_id": request_id(target)} if request_id else {})}
    # Of members with one name, the server reads the last: what the client sent stays as it is.
    parts = (memoryview(text)[: text.rindex(b"}")], b", ", msgspec.json.encode(added)[1:])
    return Rewritten(b"".join(parts), target)


def announcing(send: Send, url: str, announcement: Callable[[], str]) -> Send:
    """A `send` for the server's lifespan events. After the start, when the server can be reached at `url`, it prints
    the line that `told` returns."""
    tasks: set[asyncio.Task[None]] = set()

    async def passed(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            # The application is ready; the server starts to listen after this.
            tasks.add(asyncio.create_task(_announce(url, announcement)))

    return passed


async def _announce(url: str, announcement: Callable[[], str]) -> None:
    place = urlsplit(url)
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.close()
            break
        await asyncio.sleep(POLL_SECONDS)
    print(announcement(), flush=True)


class AliasMiddleware:
    """vLLM creates it with the app as its only argument; settings come from the environment that `flywheel serve`
    sets."""

    def __init__(self, app: App) -> None:
        self._app = app
        settings, file = ServerSettings.of_environment(), os.environ.get(FILE_VARIABLE)
        self._aliases = AliasTable(
            os.environ.get(ALIAS_VARIABLE, "").splitlines(),
            os.environ.get(BASE_VARIABLE, ""),
            Path(file) if file else None,
            settings.loaded,
            settings.waiting or {},
        )
        self._gate = Gate.of_environment(open_metrics=settings.open_metrics)
        self._exposes_versions = settings.expose_versions
        hosts = settings.allowed_hosts
        limits = ServerLimits(
            hosts=None if hosts is None else frozenset(hosts),
            host_hint="Name it in serving.allowed_hosts.",
            body_bytes=settings.max_body_bytes,
            body_hint="The limit is serving.max_body_mb.",
            bodies_held=BODIES_HELD,
        )
        self._limited = Limited(self._let_in, limits, refuse)
        self._recorder = CallRecorder.of(settings.call_log)
        self._exclusions = Exclusions(**settings.not_recorded or {})
        sent_adapters = SentAdapters.of(settings.sent_adapters)
        self._slots = AdapterSlots(app, self._aliases, settings.max_adapters, sent_adapters, settings.base_path)
        self._sending = self._limited
        if (sent := self._slots.sent) is not None:
            most = sent.max_bytes
            of_files = dataclasses.replace(
                limits, body_bytes=most, body_hint=LIMIT, bodies=2, bodies_held=2, body_seconds=SECONDS
            )
            self._sending = Limited(self._let_in, of_files, refuse)
        self._address = settings.address
        self._started = int(time.time())
        # Tells clients that the server was restarted.
        self._instance = secrets.token_hex(8)
        self._management = Management(self._aliases, self._instance, self._recorder, self._slots)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            announcement = announcing(send, self._address, self._announcement) if self._address else send
            return await self._app(scope, receive, self._flushing(announcement))
        is_of_files = scope["type"] == "http" and route_path(scope).startswith(routes.ADAPTERS)
        await (self._sending if is_of_files else self._limited)(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = credential(scope)
        scope, access = self._gate.admit(scope)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        path, method = route_path(scope), scope["method"]
        may_ask = self._may_ask(access)
        send = changed(send, (404, 405), lambda status, body: not_found(status, body, self._aliases.targets))
        if path.removesuffix("/") == routes.READY:
            await self._app(_at(scope, routes.HEALTH), receive, changed(send, range(600), self._readiness))
        elif path.startswith(routes.MANAGEMENT):
            await self._management(scope, receive, send)
        elif method == "POST" and path == routes.LOAD_ADAPTER:
            await self._slots.load(scope, receive, send)
        elif method == "POST" and path == routes.UNLOAD_ADAPTER:
            await self._slots.unload(scope, receive, send)
        elif path.startswith(routes.SAGEMAKER_ADAPTERS):
            raise RefusedError(404, f"adapters are loaded at {routes.LOAD_ADAPTER}")
        elif method == "POST" and path in routes.INFERENCE and is_json(scope):
            await self._infer(scope, receive, send, key, may_ask)
        else:
            if method == "GET" and (path == routes.MODELS or path.startswith(routes.MODEL)):
                wanted = path.removeprefix(routes.MODELS).removeprefix("/")
                scope = _at(scope, routes.MODELS)

                def models(status: int, body: bytes) -> tuple[int, bytes]:
                    return listed(status, body, self._aliases.targets, self._started, may_ask, wanted)

                send = changed(send, (200,), models)
            await self._app(scope, receive, send)

    def _may_ask(self, access: Access) -> Callable[[str], bool]:
        """Whether a client may ask for the model of a name, besides the aliases."""
        base = self._aliases.base_model
        shows_all = access is Access.ADMIN or self._exposes_versions or not base
        return lambda model: shows_all or model in ("", base)

    async def _infer(
        self, scope: Scope, receive: Receive, send: Send, key: bytes, may_ask: Callable[[str], bool]
    ) -> None:
        """`key` is the client's, which the request to vLLM does not have."""

        path = route_path(scope)
        sender, assigned, caller = credential_of(key), Assignment(""), Caller("", "")

        def resolve(model: str, body: Mapping[str, msgspec.Raw]) -> str | None:
            nonlocal assigned, caller
            if why := self._aliases.waiting.get(model):
                raise RefusedError(503, f"{model} has no answer yet: {why}")
            target = self._aliases.targets.get(model)
            if target is not None:
                caller = caller_of(scope, path, body)
                missing = self._aliases.missing.get(model, "")
                assigned = assign(target, missing, scope, sender, body, self._version)
                return assigned.version
            if not may_ask(model):
                raise RefusedError(404, unknown_model(model, self._aliases.targets))
            return None

        started_ns = time.time_ns()
        request = await Request(scope, receive).body()
        marked = functools.cache(self._new_request_id)  # The same id in the header, the body and the call log.
        # vLLM takes the id of a response from the header, but this path's from the body.
        in_body = (lambda target: f"resp_{marked(target)}") if path == routes.RESPONSES else None
        # The version is fixed here: nothing is awaited between the lookup and the app.
        body, target = rewrite_model(request, resolve, in_body)
        if target is not None:
            request_id = marked(target)
            scope = with_header(scope, b"x-request-id", request_id.encode())
            if self._recorder is not None and path in routes.RECORDED:
                if self._exclusions.refuse(scope, caller):
                    self._recorder.refuse()
                    return await with_body(self._app, scope, body, receive, send)
                call = RecordedCall(
                    request_id, path, self._version(target), sender, retries_of(scope), started_ns,
                    request=request, unit=assigned.unit, arm=assigned.arm, unit_kind=assigned.kind,
                    conversation=caller.conversation, user=caller.user,
                )  # fmt: skip
                return await self._recorder.recorded(call, self._app, scope, body, receive, send)
        elif mark_of(header(scope, b"x-request-id").decode("latin-1")):
            # Only the middleware sets this header, and only for requests to an alias.
            scope = with_header(scope, b"x-request-id", None)
        await with_body(self._app, scope, body, receive, send)

    def _version(self, target: str) -> str:
        return BASE_VERSION if target == self._aliases.base_model else target

    def _new_request_id(self, target: str) -> str:
        return new_request_id(self._instance, self._version(target))

    def _flushing(self, send: Send) -> Send:
        """A `send` for the server's lifespan events, which writes the recorded calls before the server stops."""

        async def passed(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown") and self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)
            await send(message)

        return passed

    def _readiness(self, health: int, _body: bytes) -> tuple[int, bytes]:
        """The status and body of the readiness, from those of vLLM's health."""
        counts = self._aliases.counts()
        is_ready = health == 200 and not counts["waiting"]
        return 200 if is_ready else 503, json.dumps({"ready": is_ready, "health": health, "aliases": counts}).encode()

    def _announcement(self) -> str:
        waiting, missing = self._aliases.waiting, self._aliases.missing
        targets = []
        for alias, target in self._aliases.targets.items():
            names = [each.name for each in target.versions if each.name != missing.get(alias)]
            how = f"waits: {waiting[alias]}" if alias in waiting else f"is answered by {' and '.join(names)}"
            targets.append(f"{alias} {how}")
        return f"flywheel serve is ready at {self._address}/v1: {', '.join(targets)}"


def _at(scope: Scope, path: str) -> Scope:
    """The same request for another of the server's paths."""
    return {**scope, "path": str(scope["path"]).removesuffix(route_path(scope)) + path}
