"""The endpoints that manage a server: vLLM's own that loads adapters, the alias, pages of the call log.

Requests have been authenticated with the admin key. Methods raise RefusedError, and ClientDisconnect where a client
leaves within its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request

from flywheel.errors import CallLogError
from flywheel.serving import routes
from flywheel.serving.adapter_files import why_unloadable
from flywheel.serving.alias_target import AliasTarget, ShownAliases, texts
from flywheel.serving.calls.call_log import MAX_ID_CHARACTERS, PAGE_BYTES, CallLog
from flywheel.serving.calls.call_log_page import page_json
from flywheel.serving.server.alias_table import AliasTable, TargetMismatchError
from flywheel.serving.server.asgi import answer_json, json_of, route_path, with_body
from flywheel.serving.server.call_recorder import CallRecorder
from flywheel.serving.server.sent_adapters import SentAdapters
from flywheel.system.files import remembered_tree_sha256
from flywheel.system.server_limits import App, Message, Receive, RefusedError, Scope, Send

log = logging.getLogger(__name__)

MAX_CALLS: Final = 1000


class _Adapter(msgspec.Struct):
    """What is read of a request that loads or unloads an adapter."""

    lora_name: str
    lora_path: str = ""
    sha256: str | None = None


class _Page(msgspec.Struct):
    """The calls after number `after`, at most `limit`."""

    after: Annotated[int, msgspec.Meta(ge=0, lt=10**18)] = 0
    limit: Annotated[int, msgspec.Meta(ge=0, lt=10**18)] = MAX_CALLS


class _Erasure(msgspec.Struct):
    request_ids: list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]]


class AdapterSlots:
    def __init__(
        self, app: App, aliases: AliasTable, most: int | None, sent: SentAdapters | None, base: str | None
    ) -> None:
        """`most` adapters can be loaded at the same time; None: any number. `sent` are copies of the server's own.
        Adapters are compared with the layers of the model `base`."""
        self._app = app
        self._aliases = aliases
        self.most = most
        self.sent = sent
        self._base = base
        self._one_at_a_time = asyncio.Lock()

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to vLLM if the adapter is a directory of safetensors and a slot is free for it. With
        `sha256`, its files must have that hash, and a directory that is not there is the copy with it. As far as the
        base model is known, the adapter must fit its layers.

        vLLM itself would load pickled weights, and would look for other names on the hub. With more adapters than
        slots it would move weights at each request, and on a CPU, where the last slot must stay empty, answer
        requests for the base model with an adapter.
        """
        request = Request(scope, receive)
        wanted = await json_of(request, _Adapter, "{lora_name, lora_path, sha256?}, all texts")
        path, sha256 = wanted.lora_path, wanted.sha256
        if not path or "\0" in path:
            raise RefusedError(400, "`lora_path` must be the path of a directory")
        body = await request.body()
        if self.sent is not None and sha256 is not None:
            path = str(await asyncio.to_thread(self.sent.find, path, sha256))
            body = json.dumps({**json.loads(body), "lora_path": path}).encode()
        if not await asyncio.to_thread(os.path.isdir, path):
            raise RefusedError(404, f"No adapter found for {path}")
        check = functools.partial(why_unloadable, sha256=sha256, hash_of=remembered_tree_sha256)
        if why := await asyncio.to_thread(check, Path(path)) or await asyncio.to_thread(self._why_misfit, Path(path)):
            raise RefusedError(400, f"the adapter is refused: {why}")
        async with self._one_at_a_time:
            if self.most is not None:
                loaded = await self._loaded(scope, routes.LOAD_ADAPTER)
                if wanted.lora_name not in loaded and len(loaded) >= self.most:
                    raise RefusedError(409, f"all {self.most} slots for adapters are taken: {', '.join(loaded)}")
                await _free_slots(scope)
            await with_body(self._app, scope, body, receive, send)

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to vLLM unless an alias stands for the adapter, alone or in an A/B test: a process that
        was stopped in the middle of a swap may ask late.

        Then the copies of adapters are removed that are neither loaded nor of an alias. Requests in flight do not
        read them: the engine keeps the weights until the next load.
        """
        request = Request(scope, receive)
        name = (await json_of(request, _Adapter, "{lora_name}, a text")).lora_name
        if any(each.name == name for each in self._versions()):
            raise RefusedError(409, f"an alias stands for {name}")
        copies = await asyncio.to_thread(self.sent.copies) if self.sent is not None else []
        await with_body(self._app, scope, await request.body(), receive, send)
        if self.sent is None or not copies:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an engine that has died lists nothing
            used = set((await self._loaded(scope, routes.UNLOAD_ADAPTER)).values())
            used |= {each.path or "" for each in self._versions()}
            await asyncio.to_thread(self.sent.remove, [copy for copy in copies if str(copy) not in used])

    def _why_misfit(self, folder: Path) -> str:
        if self._base is None:
            return ""
        # Not at the top: it uses transformers, which vLLM has loaded.
        from flywheel.serving.base_layers import UnknownLayersError, why_misfit

        try:
            return why_misfit(self._base, folder)
        except UnknownLayersError as error:
            log.warning("the adapter in %s is not compared with the base model: %s", folder, error)
            return ""

    def _versions(self) -> list[AliasTarget]:
        """What aliases stand for."""
        return [each for target in self._aliases.targets.values() for each in target.versions]

    async def _loaded(self, scope: Scope, route: str) -> dict[str, str]:
        """vLLM's adapters with their folders, from its own list of models."""
        answer: list[bytes] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def kept(message: Message) -> None:
            answer.append(message.get("body", b""))

        path = str(scope["path"]).replace(route, routes.MODELS)
        await self._app({**scope, "method": "GET", "path": path}, nothing, kept)
        cards = json.loads(b"".join(answer))["data"]
        return {str(card["id"]): str(card.get("root")) for card in cards if card.get("parent")}


async def _free_slots(scope: Scope) -> None:
    """Take adapters out of the engine that were unloaded: vLLM 0.32 only forgets their names, and their weights keep
    a slot. At the next load, rather than at once, requests in flight have long ended."""
    state: Any = getattr(scope.get("app"), "state", None)
    engine, models = getattr(state, "engine_client", None), getattr(state, "openai_serving_models", None)
    if engine is not None and models is not None:
        named = {request.lora_int_id for request in models.lora_requests.values()}
        for number in set(await engine.list_loras()) - named:
            await engine.remove_lora(number)


Handler = Callable[[Request], Awaitable[bytes]]


class Management:
    """The middleware's own endpoints."""

    def __init__(
        self, aliases: AliasTable, instance: str, recorder: CallRecorder | None, slots: AdapterSlots
    ) -> None:
        self._aliases = aliases
        self._instance = instance
        self._recorder = recorder
        self._sent = slots.sent
        self._most_adapters = slots.most
        # A connection of its own: reading a page and writing do not wait for each other.
        self._log = CallLog(recorder.path) if recorder else None
        self._handlers: dict[str, dict[str, Handler]] = {
            routes.ALIAS: {"GET": self._show, "PUT": self._point},
            routes.CALLS: {"GET": self._page},
            routes.ERASE_CALLS: {"POST": self._erase},
            **({} if self._sent is None else {routes.ADAPTERS: {"PUT": self._receive}}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = route_path(scope), scope["method"]
        handlers = self._handlers.get(routes.ADAPTERS if path.startswith(routes.ADAPTERS) else path)
        if handlers is None:
            raise RefusedError(404, f"there are only {', '.join(self._handlers)} and {routes.READY}")
        if method not in handlers:
            raise RefusedError(405, f"{path} takes {' and '.join(handlers)}, not {method}")
        await answer_json(send, 200, await handlers[method](Request(scope, receive)))

    async def _page(self, request: Request) -> bytes:
        try:
            page = msgspec.convert(dict(request.query_params), _Page, strict=False)
        except msgspec.ValidationError as error:
            raise RefusedError(400, f"`after` and `limit` must be whole numbers, 0 or more: {error}") from None
        if self._recorder is None or self._log is None:
            raise _no_calls()
        limit, uncounted = min(page.limit, MAX_CALLS), self._recorder.uncounted
        try:
            return await asyncio.to_thread(page_json, self._log, page.after, limit, PAGE_BYTES, uncounted)
        except CallLogError as error:
            raise RefusedError(503, str(error)) from error

    async def _erase(self, request: Request) -> bytes:
        if self._recorder is None:
            raise _no_calls()
        form = f"{{request_ids}}, a list of texts of 1 to {MAX_ID_CHARACTERS} characters"
        wanted = await json_of(request, _Erasure, form)
        try:
            done = await asyncio.wrap_future(self._recorder.erase(wanted.request_ids))
        except CallLogError as error:
            raise RefusedError(503, str(error)) from error
        return json.dumps({"erased": done.erased, "purged": done.is_purged}).encode()

    async def _receive(self, request: Request) -> bytes:
        assert self._sent is not None
        sha256, _, name = route_path(request.scope).removeprefix(routes.ADAPTERS).partition("/")
        await self._sent.receive(sha256, name, request)
        return b"{}"

    async def _show(self, _request: Request) -> bytes:
        targets = self._aliases.targets
        shown = ShownAliases(
            aliases={alias: target.name for alias, target in targets.items()},
            paths={target.name: target.path for target in targets.values() if target.path},
            digests={target.name: target.sha256 for target in targets.values() if target.sha256},
            ab_tests={alias: target.ab_test.as_json() for alias, target in targets.items() if target.ab_test},
            waiting=self._aliases.waiting,
            missing=self._aliases.missing,
            revisions={alias: self._aliases.revision(alias) for alias in targets},
            base_model=self._aliases.base_model,
            instance=self._instance,
            max_adapters=self._most_adapters,
        )
        return msgspec.json.encode(shown)

    async def _point(self, request: Request) -> bytes:
        form = (
            "{alias, target, path?, sha256?, expected?, waiting?, missing?}, all texts, a number revision?, and "
            "ab_test?: {target, path?, sha256?, share, salt}, with a share between 0 and 1"
        )
        wanted = await json_of(request, dict[str, Any], form)
        try:
            name, alias, expected, waiting, missing = texts(wanted, "alias", "expected", "waiting", "missing")
            target = AliasTarget.of_json(wanted)
            revision = wanted.get("revision")
            if not isinstance(revision, int | None):
                raise TypeError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RefusedError(400, f"expected {form}") from None
        names = [each.name for each in target.versions]
        if not alias or not name or alias in (*names, self._aliases.base_model) or len({*names}) < len(names):
            raise RefusedError(400, "an alias must have a name of its own, and the versions of an A/B test two")
        if missing and (target.ab_test is None or missing not in names):
            raise RefusedError(400, "only a version of the A/B test can be missing")
        if self._sent is not None:
            target = await asyncio.to_thread(self._sent.located, target)
        try:
            previous = await self._aliases.point(alias, target, expected, waiting or "", missing or "", revision)
        except TargetMismatchError as mismatch:
            raise RefusedError(409, f"{alias} is {mismatch.current}") from None
        except OSError as error:
            raise RefusedError(500, f"the alias file cannot be written: {error}") from None
        return json.dumps({"alias": alias, "target": name, "previous": previous}).encode()


def _no_calls() -> RefusedError:
    return RefusedError(404, "this server records no calls: serving.call_log is false")
