"""The client of one replica: vLLM's administrative calls and the alias, with errors that name the remedy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2
import msgspec

from flywheel.errors import Condition, ServeError
from flywheel.secrets import redact_secrets
from flywheel.serving import routes
from flywheel.serving.adapter_files import FILES
from flywheel.serving.alias_target import ABTest, AliasTarget, ShownAliases, version_names
from flywheel.serving.calls.call_log import MAX_ID_CHARACTERS, MAX_PAGE_BYTES
from flywheel.serving.calls.call_log_page import CallPage, read_page
from flywheel.serving.replica_addresses import is_name
from flywheel.system.http_client import MAX_ANSWER_BYTES, AnswerTooLargeError, async_client

T = TypeVar("T")
CONNECT_SECONDS = 5.0
QUICK_SECONDS = 15.0
"""Timeout in seconds of calls that are instant on a healthy server: a hanging replica must not delay a rollback."""
ERASED_AT_ONCE = 250
"""Request ids of one request, which a server accepts whatever their length."""
MEASURED_AT_ONCE = 4
"""Measurements of tokens at the same time: more would delay the answers to clients."""


def load_error(attempted: str, response: httpx2.Response, path: str, *, healthy: bool) -> ServeError:
    """The error for an adapter that was not loaded, by a server whose engine is alive or not."""
    message = message_of(response)
    if response.status_code in (404, 405) and "adapter" not in message:
        return ServeError(
            attempted,
            "it does not load adapters at run time",
            "Start it with `flywheel serve`, or with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.",
        ).of_condition(Condition.MISCONFIGURED)
    if _lacks_files(response):
        return ServeError(
            attempted,
            f"the server finds no adapter in {path}",
            "The directory must exist on the server's own disk, under the same path.",
        ).of_condition(Condition.MISCONFIGURED)
    if response.status_code == 409:
        hint = f"Unload one (POST {routes.UNLOAD_ADAPTER}), or raise serving.max_loras and restart the server."
        return ServeError(attempted, message, hint)
    if response.status_code == 400 and "the adapter is refused" in message:
        hint = "Restore its files from a backup, remove what is not safetensors, or train the adapter again."
        return ServeError(attempted, message, hint)
    # vLLM: "LoRA rank 64 is greater than max_lora_rank 16."
    if rank := re.search(r"rank (\d+) is greater than max_lora_rank (\d+)", message):
        wanted, most = rank.groups()
        return ServeError(
            attempted,
            f"rank {wanted} > max_lora_rank {most}",
            f"Restart the server with serving.max_lora_rank {wanted}, or train with a smaller training.lora.r.",
        )
    if "not enabled" in message:
        error = ServeError(attempted, "LoRA is not enabled on it", "Start it with `flywheel serve`.")
        return error.of_condition(Condition.MISCONFIGURED)
    # vLLM also answers 500 for adapters that it can never serve. If the engine is alive, it has examined the adapter.
    if response.status_code == 500 and healthy:
        return ServeError(
            attempted,
            f"the server refuses it: {message}",
            "Look at its log: vLLM serves no DoRA, no modules_to_save, no trained biases and no embeddings.",
        )
    return refused(attempted, response)


def _lacks_files(response: httpx2.Response) -> bool:
    return response.status_code == 404 and "adapter" in message_of(response)


def no_middleware(attempted: str, why: str = "it has no alias middleware") -> ServeError:
    return ServeError(
        attempted,
        why,
        "Start it with `flywheel serve`, or with --middleware flywheel.serving.server.middleware.AliasMiddleware and "
        "FLYWHEEL_ALIAS, FLYWHEEL_BASE_MODEL (its served name), FLYWHEEL_ALIAS_FILE and FLYWHEEL_ADMIN_KEY in its "
        "environment.",
    ).of_condition(Condition.MISCONFIGURED)


def refused(attempted: str, response: httpx2.Response) -> ServeError:
    why = f"it answers HTTP {response.status_code}: {message_of(response)}"
    retryable = response.status_code >= 500 or response.status_code in (408, 429)
    error = ServeError(attempted, why, "Look at the server's log.", retryable=retryable)
    # Redirections, and places that are not there: something else answers in the server's place.
    is_elsewhere = response.status_code < 400 or response.status_code in (404, 405, 407)
    return error.of_condition(Condition.MISCONFIGURED) if is_elsewhere else error


def message_of(response: httpx2.Response) -> str:
    """The server's own words, in one line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.text
    return " ".join(redact_secrets(str(text)).split())[:500] or "no explanation"


@dataclass(frozen=True, slots=True)
class Alias:
    """The target of an alias on one replica: a model's name and, unless it is the base model, its directory and the
    hash of its files, None if none was recorded. `instance` changes with each start of the server. `max_adapters` can
    be loaded at the same time; None if the server has no limit. `waiting` is the reason why the server refuses
    requests to the alias until its target is set; empty if it answers. `missing` is the version of an A/B test that
    is not loaded, whose share the other one answers; empty if both are. `revision` increases by one with each setting
    of the alias and differs between starts of the server; None for an alias that was never set there."""

    target: str
    path: str | None
    base_model: str
    sha256: str | None = None
    instance: str = ""
    max_adapters: int | None = None
    waiting: str = ""
    ab_test: ABTest | None = None
    missing: str = ""
    revision: int | None = None

    @property
    def serves(self) -> str:
        """The model that answers, of two the new one; empty if none does."""
        return next(iter(self.answering), "")

    @property
    def answering(self) -> list[str]:
        """The models that answer, of two the new one first."""
        return [] if self.waiting else [name for name in self.versions if name != self.missing]

    @property
    def versions(self) -> list[str]:
        """The target, and the other version of an A/B test."""
        return version_names(self.target, self.ab_test)


class AliasChangedError(ServeError):
    """An alias has another target or revision than expected: something else has set it."""


class Replica:
    """A vLLM server with the alias middleware. Every method raises ServeError."""

    def __init__(self, url: str, admin_key: str | None = None, *, timeout_seconds: float = 120.0) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._seconds = timeout_seconds
        self._http = async_client(self.url, seconds=timeout_seconds, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self) -> bool:
        """Whether the server answers and its engine is alive."""
        return await self._health() == 200

    async def is_down(self) -> bool:
        """Whether the server reports a dead engine or does not answer. A proxy that refuses the path counts as
        neither."""
        status = await self._health()
        return status is None or status >= 500

    async def _health(self) -> int | None:
        try:
            answer = await self._http.get("/health", timeout=self._quick_seconds, extensions={"max_bytes": 0})
            return answer.status_code
        except httpx2.HTTPError:
            return None

    async def models(self) -> dict[str, str]:
        """The loaded models, name → path; without aliases."""
        attempted = f"list the models of {self.url}"
        listing = self._json(await self._call("GET", "/v1/models", attempted), attempted)
        cards = listing.get("data")
        if not isinstance(cards, list):
            raise self._not_vllm(attempted)
        try:
            return {
                str(card["id"]): card.get("root") or ""
                for card in cards
                if card.get("owned_by") != routes.ALIAS_OWNER
            }
        except (KeyError, TypeError, AttributeError):
            raise self._not_vllm(attempted) from None

    async def load(self, name: str, path: str, sha256: str | None = None) -> bool:
        """Load the adapter in directory `path` as `name`; False when it was already there from the same path.

        With the hash of its files, they are sent to a server that does not have that directory. A name is never
        loaded again in place: vLLM would read it from disk on every request from then on.
        """
        attempted = f"load adapter {name} on {self.url}"
        if await self.has(name, path, sha256):
            return False
        wanted = {"lora_name": name, "lora_path": path, **({"sha256": sha256} if sha256 else {})}
        response = await self._call("POST", routes.LOAD_ADAPTER, attempted, wanted, self._seconds)
        if sha256 and _lacks_files(response) and await self._send(path, sha256):
            response = await self._call("POST", routes.LOAD_ADAPTER, attempted, wanted, self._seconds)
        if response.status_code == 200:
            return True
        # Another client may have loaded it since the check.
        if response.status_code == 400 and await self.has(name, path, sha256):
            return False
        raise load_error(attempted, response, path, healthy=await self.ready())

    async def _send(self, path: str, sha256: str) -> bool:
        """Send the files of an adapter; False to a server that does not accept any, or where they are not here."""
        for name in FILES:
            attempted = f"send {Path(path, name)} to {self.url}"
            place, pieces = f"{routes.ADAPTERS}{sha256}/{name}", _pieces(Path(path, name))
            try:
                response = await self._call("PUT", place, attempted, seconds=self._seconds, file=pieces)
            except FileNotFoundError:
                return False
            except OSError as error:
                why = f"it cannot be read: {error.strerror or error}"
                raise ServeError(attempted, why, "Restore the adapter's files from a backup.") from error
            if response.status_code == 404:
                return False
            if response.status_code != 200:
                raise refused(attempted, response)
        return True

    async def unload(self, name: str) -> bool:
        """Unload the name; requests in flight complete. False when it was not loaded."""
        attempted = f"unload adapter {name} on {self.url}"
        response = await self._call("POST", routes.UNLOAD_ADAPTER, attempted, {"lora_name": name})
        if response.status_code == 404 and name not in await self.models():
            return False
        if response.status_code != 200:
            raise refused(attempted, response)
        return True

    async def alias(self, alias: str) -> Alias:
        """The target of `alias`; an alias that was never set points to the base model."""
        attempted = f"ask {self.url} what {alias} stands for"
        response = await self._call("GET", routes.ALIAS, attempted)
        try:
            shown = msgspec.convert(self._json(response, attempted), ShownAliases)
            ab_test = shown.ab_tests.get(alias)
            target = shown.aliases.get(alias, shown.base_model)
            found = Alias(
                target,
                shown.paths.get(target),
                shown.base_model,
                shown.digests.get(target),
                shown.instance,
                shown.max_adapters,
                shown.waiting.get(alias, ""),
                ABTest.of_json(ab_test) if ab_test else None,
                shown.missing.get(alias, ""),
                shown.revisions.get(alias),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise no_middleware(attempted) from None
        if not found.base_model:
            raise no_middleware(attempted, "its alias middleware does not know FLYWHEEL_BASE_MODEL")
        return found

    async def calls(self, after: int, limit: int) -> CallPage | None:
        """A page of the server's call log, behind the call of number `after`; None if the server keeps no log."""
        attempted = f"pull calls from {self.url}"
        path = f"{routes.CALLS}?after={after}&limit={limit}"
        response = await self._call("GET", path, attempted, max_bytes=MAX_PAGE_BYTES)
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise refused(attempted, response)
        try:
            return await asyncio.to_thread(read_page, response.content, after)
        except ValueError as error:
            raise self._not_vllm(attempted, f" and no page of a call log: {error}") from None

    async def erase_calls(self, request_ids: Sequence[str]) -> bool:
        """Erase calls from the server's log; whether no trace of them is left there. True for a server that keeps no
        log. A server that cannot say so yet is asked again later. Raises ServeError."""
        attempted = f"erase calls at {self.url}"
        is_purged = True
        # Servers make no other ids.
        ids = [each for each in request_ids if each.isascii() and 0 < len(each) <= MAX_ID_CHARACTERS]
        for start in range(0, len(ids), ERASED_AT_ONCE):
            wanted = {"request_ids": ids[start : start + ERASED_AT_ONCE]}
            response = await self._call("POST", routes.ERASE_CALLS, attempted, wanted, self._seconds)
            if response.status_code == 404 and "serving.call_log" in message_of(response):
                return True
            purged = self._json(response, attempted).get("purged")
            if not isinstance(purged, bool):
                raise self._not_vllm(attempted)
            is_purged = purged
        return is_purged

    async def point(
        self,
        alias: str,
        target: str,
        expected: str,
        path: str | None = None,
        sha256: str | None = None,
        waiting: str = "",
        ab_test: ABTest | None = None,
        missing: str = "",
        revision: int | None = None,
    ) -> None:
        """Point `alias` to `target` if it points to `expected` now, and its revision is `revision`, if that is given;
        later requests use it, or are refused for the reason in `waiting`. With `ab_test`, the other version answers a
        part of them; of the two, `missing` is not loaded. Raises AliasChangedError if it does not."""
        attempted = f"point {alias} at {target} on {self.url}"
        wanted = {"alias": alias, "expected": expected, "waiting": waiting, "missing": missing, "revision": revision}
        wanted |= AliasTarget(target, path, sha256, ab_test).as_json()
        response = await self._call("PUT", routes.ALIAS, attempted, wanted)
        if response.status_code == 404:
            raise no_middleware(attempted)
        if response.status_code == 409:
            raise AliasChangedError(
                attempted,
                f"{message_of(response)}, not {expected}: something else has changed it",
                "Make sure that only one Flywheel manages this server.",
                retryable=True,
            )
        if response.status_code != 200:
            raise refused(attempted, response)

    async def logprobs(self, model: str, texts: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability, in nats, of the last token of each text (token ids) under `model`.

        One request per token, with that token as the only allowed one: vLLM reports the log-probability before this
        restriction. `prompt_logprobs` would need a single request per text, but on a CPU vLLM 0.32 computes it with a
        wrong shape when LoRA is enabled and other requests run, and the engine dies.
        """
        attempted = f"measure {model} on {self.url}"
        free = asyncio.Semaphore(MEASURED_AT_ONCE)

        async def measure(text: Sequence[int]) -> float:
            request = {
                "model": model,
                "prompt": text[:-1],
                "max_tokens": 1,
                "temperature": 0,
                "allowed_token_ids": [text[-1]],
                "logprobs": 0,
            }
            async with free:
                response = await self._call("POST", "/v1/completions", attempted, request, self._seconds)
            if response.status_code == 404:
                why = f"it does not have it: {message_of(response)}"
                raise ServeError(attempted, why, "A server that has restarted is asked again.", retryable=True)
            answer = self._json(response, attempted)
            try:
                if answer["model"] != model:
                    why = f"{answer['model']} answered"
                    raise ServeError(attempted, why, "Restart the server with `flywheel serve`.")
                return float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._not_vllm(attempted) from None

        return await asyncio.gather(*map(measure, texts))

    async def has(self, name: str, path: str, sha256: str | None = None) -> bool:
        """Whether the adapter is loaded, from the path or from the server's own copy, whose name is the hash. Raises
        ServeError when another one has its name."""
        root = (await self.models()).get(name)
        if root is not None and root != path and Path(root).name != sha256:
            raise ServeError(
                f"load adapter {name} on {self.url}",
                f"that name is taken by another adapter, from {root}",
                "Restart the server with `flywheel serve`: a name must never change its weights.",
            ).of_condition(Condition.MISCONFIGURED)
        return root is not None

    @property
    def _quick_seconds(self) -> float:
        return min(self._seconds, QUICK_SECONDS)

    async def _call(
        self,
        method: str,
        path: str,
        attempted: str,
        content: Any = None,
        seconds: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        file: AsyncIterator[bytes] | None = None,
    ) -> httpx2.Response:
        """The answer with headers and whole body, within `seconds` and of `max_bytes` at most."""
        if is_name(self.url):
            raise ServeError(
                attempted,
                "the name has no address now, or no name server answers",
                "Correct it in serving.urls, or start servers that it stands for. On Kubernetes it is the name of a "
                "headless Service with publishNotReadyAddresses: true.",
                retryable=True,
            ).of_condition(Condition.UNREACHABLE)
        timeout = httpx2.Timeout(seconds or self._quick_seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._http.request(
                method,
                path,
                json=content,
                content=file,
                timeout=timeout,
                extensions={"max_bytes": max_bytes},
            )
        except httpx2.TimeoutException as error:
            raise ServeError(
                attempted,
                f"no answer within its time ({type(error).__name__})",
                "See whether the server is overloaded, or raise serving.load_timeout_seconds.",
                retryable=True,
            ).of_condition(Condition.UNREACHABLE) from error
        except (httpx2.DecodingError, AnswerTooLargeError) as error:
            raise self._not_vllm(attempted, f": {error}") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = "Name the file of the authority that signed it in SSL_CERT_FILE, or correct serving.urls."
                why = f"its certificate is not trusted ({error})"
                raise ServeError(attempted, why, hint).of_condition(Condition.MISCONFIGURED) from error
            raise ServeError(
                attempted,
                f"it cannot be reached ({error or type(error).__name__})",
                "Start it with `flywheel serve`, or correct serving.urls.",
                retryable=True,
            ).of_condition(Condition.UNREACHABLE) from error
        if response.status_code in (401, 403):
            raise ServeError(
                attempted,
                "it refuses the key",
                "Use the state directory that `flywheel serve` uses, where its admin key is, or name the environment "
                "variable with that key in serving.admin_key_env on both sides.",
            ).of_condition(Condition.MISCONFIGURED)
        if response.status_code in (502, 503, 504):
            raise ServeError(
                attempted,
                f"it is not ready (HTTP {response.status_code})",
                "Look at the server's log; restart it if its engine has died.",
                retryable=True,
            ).of_condition(Condition.UNREACHABLE)
        return response

    def _json(self, response: httpx2.Response, attempted: str) -> dict[str, Any]:
        if response.status_code == 404 and routes.ALIAS in str(response.url):
            raise no_middleware(attempted)
        if response.status_code != 200:
            raise refused(attempted, response)
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            raise self._not_vllm(attempted) from None
        if not isinstance(answer, dict):
            raise self._not_vllm(attempted)
        return answer

    def _not_vllm(self, attempted: str, why: str = "") -> ServeError:
        hint = f"See whether {self.url} is the inference server."
        return ServeError(attempted, f"its answer is not what vLLM answers{why}", hint).of_condition(
            Condition.MISCONFIGURED
        )


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, 1 << 20):
            yield piece


async def every(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of calls on several replicas, or the first error after every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
