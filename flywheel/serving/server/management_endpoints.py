"""The endpoints that manage a server: vLLM's own that loads adapters, the alias, pages of the call log.

Requests have been authenticated with the admin key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from flywheel.errors import CallLogError
from flywheel.serving import routes
from flywheel.serving.adapter_files import why_unloadable
from flywheel.serving.alias_target import AliasTarget, texts
from flywheel.serving.calls.call_log import MAX_ID_CHARACTERS, PAGE_BYTES, CallLog
from flywheel.serving.calls.call_log_page import page_json
from flywheel.serving.server.alias_table import AliasTable, TargetMismatchError
from flywheel.serving.server.asgi import answer, answer_json, parsed, route_path, with_body
from flywheel.serving.server.call_recorder import CallRecorder
from flywheel.serving.server.sent_adapters import SentAdapters
from flywheel.system.files import remembered_tree_sha256
from flywheel.system.server_limits import App, Message, Receive, RefusedError, Scope, Send, read_body

log = logging.getLogger(__name__)

MAX_BYTES: Final = 65536
MAX_CALLS: Final = 1000


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
        base model is known, the adapter must fit its layers. Raises RefusedError.

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
        sha256 = wanted.pop("sha256", None)
        if not isinstance(sha256, str | None):
            raise RefusedError(400, "`sha256` must be the hash of the adapter's files, a text")
        if self.sent is not None and sha256 is not None:
            path = str(await asyncio.to_thread(self.sent.find, path, sha256))
            body = json.dumps({**wanted, "lora_path": path}).encode()
        if not await asyncio.to_thread(os.path.isdir, path):
            raise RefusedError(404, f"No adapter found for {path}")
        check = functools.partial(why_unloadable, sha256=sha256, hash_of=remembered_tree_sha256)
        if why := await asyncio.to_thread(check, Path(path)) or await asyncio.to_thread(self._why_misfit, Path(path)):
            raise RefusedError(400, f"the adapter is refused: {why}")
        async with self._one_at_a_time:
            if self.most is not None:
                loaded = await self._loaded(scope, routes.LOAD_ADAPTER)
                if wanted.get("lora_name") not in loaded and len(loaded) >= self.most:
                    raise RefusedError(409, f"all {self.most} slots for adapters are taken: {', '.join(loaded)}")
                await _free_slots(scope)
            await with_body(self._app, scope, body, receive, send)

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to vLLM unless an alias stands for the adapter, alone or while it is split: a process that
        was stopped in the middle of a swap may ask late. Raises RefusedError.

        Then the copies of adapters are removed that are neither loaded nor of an alias. Requests in flight do not
        read them: the engine keeps the weights until the next load.
        """
        body = await read_body(receive)
        if body is None:
            return
        wanted = parsed(body, MAX_BYTES)
        name = wanted.get("lora_name") if isinstance(wanted, dict) else None
        if any(each.name == name for each in self._versions()):
            raise RefusedError(409, f"an alias stands for {name}")
        copies = await asyncio.to_thread(self.sent.copies) if self.sent is not None else []
        await with_body(self._app, scope, body, receive, send)
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


class CallEndpoint:
    def __init__(self, recorder: CallRecorder | None) -> None:
        self._recorder = recorder
        # A connection of its own: reading a page and writing do not wait for each other.
        self._log = CallLog(recorder.path) if recorder else None

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Answer with the calls after number `after`, at most `limit`. Raises RefusedError."""
        if scope["method"] != "GET":
            raise RefusedError(405, "GET reads the recorded calls")
        if self._recorder is None or self._log is None:
            raise RefusedError(404, "this server records no calls: serving.call_log is false")
        given = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        after, limit = _number(given, "after", 0), _number(given, "limit", MAX_CALLS)
        try:
            page = await asyncio.to_thread(self._page, self._log, after, min(limit, MAX_CALLS), self._recorder)
        except CallLogError as error:
            raise RefusedError(503, str(error)) from error
        await answer_json(send, 200, page)

    @staticmethod
    def _page(log: CallLog, after: int, limit: int, recorder: CallRecorder) -> bytes:
        return page_json(log, after, limit, PAGE_BYTES, recorder.uncounted)

    async def erase(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Erase the calls that the body names. Raises RefusedError."""
        if scope["method"] != "POST":
            raise RefusedError(405, "POST erases recorded calls")
        if self._recorder is None:
            raise RefusedError(404, "this server records no calls: serving.call_log is false")
        if (body := await read_body(receive)) is None:
            return
        wanted = parsed(body, MAX_BYTES)
        ids = wanted.get("request_ids") if isinstance(wanted, dict) else None
        if not isinstance(ids, list) or not all(isinstance(i, str) and 0 < len(i) <= MAX_ID_CHARACTERS for i in ids):
            raise RefusedError(
                400, f"expected {{request_ids}}, a list of texts of 1 to {MAX_ID_CHARACTERS} characters"
            )
        try:
            done = await asyncio.wrap_future(self._recorder.erase(ids))
        except CallLogError as error:
            raise RefusedError(503, str(error)) from error
        await answer(send, 200, {"erased": done.erased, "purged": done.is_purged})


def _number(given: dict[str, list[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RefusedError(400, f"`{name}` must be a whole number, 0 or more")
    return int(text)


class Management:
    def __init__(
        self, aliases: AliasTable, instance: str, recorder: CallRecorder | None, slots: AdapterSlots
    ) -> None:
        self._aliases = aliases
        self._instance = instance
        self._slots = slots
        self._calls = CallEndpoint(recorder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the middleware's own endpoints. Raises RefusedError."""
        path = route_path(scope)
        if path == routes.CALLS:
            return await self._calls(scope, send)
        if path == routes.ERASE_CALLS:
            return await self._calls.erase(scope, receive, send)
        if path.startswith(routes.ADAPTERS) and self._slots.sent is not None:
            if scope["method"] != "PUT":
                raise RefusedError(405, "PUT sends the files of an adapter")
            if await self._slots.sent.receive(path.removeprefix(routes.ADAPTERS), receive):
                await answer(send, 200, {})
            return
        if path != routes.ALIAS:
            known = (
                f"{routes.ALIAS}, {routes.ADAPTERS}SHA256, {routes.CALLS}, {routes.ERASE_CALLS} and {routes.READY}"
            )
            raise RefusedError(404, f"there are only {known}")
        if scope["method"] == "GET":
            await answer(send, 200, self._shown())
        elif scope["method"] == "PUT":
            body = await read_body(receive)
            if body is not None:
                await self._point(parsed(body, MAX_BYTES), send)
        else:
            raise RefusedError(405, "GET shows the aliases, PUT sets one")

    def _shown(self) -> dict[str, Any]:
        targets = self._aliases.targets
        return {
            "aliases": {alias: target.name for alias, target in targets.items()},
            "paths": {target.name: target.path for target in targets.values() if target.path},
            "digests": {target.name: target.sha256 for target in targets.values() if target.sha256},
            "splits": {alias: target.split.as_json() for alias, target in targets.items() if target.split},
            "waiting": dict(self._aliases.waiting),
            "missing": dict(self._aliases.missing),
            "revisions": {alias: self._aliases.revision(alias) for alias in targets},
            "base_model": self._aliases.base_model,
            "instance": self._instance,
            "max_adapters": self._slots.most,
        }

    async def _point(self, wanted: Any, send: Send) -> None:
        try:
            name, alias, expected, waiting, missing = texts(wanted, "alias", "expected", "waiting", "missing")
            target = AliasTarget.of_json(wanted)
            revision = wanted.get("revision")
            if not isinstance(revision, int | None):
                raise TypeError
        except (KeyError, TypeError, ValueError, AttributeError):
            form = "{alias, target, path?, sha256?, expected?, waiting?, missing?}, all texts, a number revision?"
            more = "and split?: {target, path?, sha256?, share, salt}, with a share between 0 and 1"
            raise RefusedError(400, f"expected {form}, {more}") from None
        names = [each.name for each in target.versions]
        if not alias or not name or alias in (*names, self._aliases.base_model) or len({*names}) < len(names):
            raise RefusedError(400, "an alias must have a name of its own, and the versions of a split two")
        if missing and (target.split is None or missing not in names):
            raise RefusedError(400, "only a version of the split can be missing")
        if self._slots.sent is not None:
            target = await asyncio.to_thread(self._slots.sent.located, target)
        try:
            previous = await self._aliases.point(alias, target, expected, waiting or "", missing or "", revision)
        except TargetMismatchError as mismatch:
            raise RefusedError(409, f"{alias} is {mismatch.current}") from None
        except OSError as error:
            raise RefusedError(500, f"the alias file cannot be written: {error}") from None
        is_split = target.split is not None
        await answer(send, 200, {"alias": alias, "target": name, "previous": previous, "split": is_split})
