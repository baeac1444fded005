"""Sends what the events of the state say to targets: at least once, in their order. One is an entry of `notify`, a
webhook or a command that gets notices.

Each target has a position of its own among the events, stored when what was sent has arrived. A target that does not
answer delays neither the others nor the daemon; it is tried again after a growing time, and after a restart. What is
sent is read from the state before each attempt, so that nothing is sent that was erased before it.

What is sent to webhooks follows Standard Webhooks: https://github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from flywheel.config.file import Config
from flywheel.config.notices import NotifySettings
from flywheel.config.section import check_url
from flywheel.errors import NotifyError
from flywheel.secrets import environment_without_secrets, redact_secrets, register_secret, whole_url
from flywheel.store import notices
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.store.notices import Notice
from flywheel.store.stages import Pass
from flywheel.system.heartbeat import beat
from flywheel.system.terminal import quantity

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

EVENTS_AT_ONCE: Final = 2_000
"""Events that are read in one transaction."""
NOTICES_AT_ONCE: Final = 100
"""Notices of the same type that are sent together."""
STORED_AFTER: Final = 20_000
"""A position is stored when something was sent, or else after this many events."""
LONGEST_WAIT_SECONDS: Final = 3600.0
WAITS: Final = 5.0, LONGEST_WAIT_SECONDS
"""After a failure, at first and at most."""
SECRET_PREFIX: Final = "whsec_"
"""Marks a key in base64; other keys are used as they are."""


class Target(ABC):
    """What the daemon sends to. `attempted` names it in errors, and `hint` says what to do about most of them."""

    def __init__(self, store: Store, attempted: str, hint: str) -> None:
        self._store = store
        self._attempted, self._hint = attempted, hint
        self._position = self._stored = 0

    @abstractmethod
    async def begin(self) -> None:
        """Find the position among the events. A new target is not told of what happened before."""

    @abstractmethod
    async def _next(self) -> tuple[Sequence[Any], int]:
        """What is to be sent next, and the number of the event after which the rest is found."""

    @abstractmethod
    async def _send(self, found: Sequence[Any], /) -> None:
        """Send that. Raises NotifyError."""

    @abstractmethod
    async def _keep(self, position: int) -> None:
        """Store the position."""

    async def deliver(self) -> Pass:
        """Send what is new. Raises NotifyError; what did not arrive is sent by the next call."""
        result = Pass.IDLE
        while True:
            # Read again before each attempt: what was erased since is not sent.
            found, end = await self._next()
            if found:
                await self._send(found)
                result = Pass.WORKED
            elif end == self._position:
                return result
            self._position = end
            if found or end - self._stored > STORED_AFTER:
                await self._keep(end)
                self._stored = end

    @contextlib.asynccontextmanager
    async def _client(self, url: str, seconds: float) -> AsyncIterator[httpx2.AsyncClient]:
        """A client whose failures are NotifyErrors."""
        import httpx2

        from flywheel.system.http_client import async_client

        try:
            async with async_client(url, seconds=seconds, proxies=True) as client:
                yield client
        except httpx2.TimeoutException:
            raise self._failure(f"no answer within {seconds:g} s") from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise self._failure(why.replace(url, "the URL")) from None

    def _failure(self, why: str, hint: str = "") -> NotifyError:
        return NotifyError(self._attempted, why, hint or self._hint, retryable=True)

    def _refusal(self, answer: httpx2.Response) -> NotifyError:
        """The error for an answer that is none of success, with the wait that it asks for."""
        from flywheel.system.http_client import parse_retry_after

        error = self._failure(f"it answered {answer.status_code}")
        after = parse_retry_after(answer.headers.get("retry-after", "")) or 0.0
        error.retry_after = min(after, LONGEST_WAIT_SECONDS)
        return error


async def resume(store: Store, config: Config) -> None:
    """Find the position of each entry of `notify`, before its target begins."""
    if dropped := await store.write(notices.resume, config.notify):
        log.warning(
            "%s dropped: their entry of `notify` was removed",
            quantity(dropped, "notice"),
        )


class NoticeTarget(Target):
    """One entry of `notify`."""

    def __init__(self, store: Store, config: Config, settings: NotifySettings) -> None:
        self._settings = settings
        hint = "It is retried; correct the entry of `notify`, or the receiver."
        super().__init__(store, f"notify {self}", hint)
        self._alias = "+".join(config.aliases)
        self._web_url = config.deploy.web_url.rstrip("/")
        self._sent_in_vain = 0
        """The last notice of those that were sent in vain. Their texts are not kept: they may be erased meanwhile."""

    def __str__(self) -> str:
        """For messages: the name, or of a URL, which may be a secret, the host."""
        if self._settings.name is not None:
            return self._settings.name
        if self._settings.command is not None:
            return self._settings.command[0]
        return urlsplit(self._settings.target or "").hostname or f"${self._settings.url_env}"

    async def begin(self) -> None:
        """Find the position that `resume` noted."""
        noted = await self._store.read(database.noted, notices.keys_of(self._settings)[0])
        self._position = self._stored = int(noted.split()[0])

    async def _next(self) -> tuple[list[Notice], int]:
        limits = {"limit": EVENTS_AT_ONCE, "most": NOTICES_AT_ONCE}
        found, end = await self._store.read(notices.after, self._position, frozenset(self._settings.on), **limits)
        if not found:
            return [], end
        alike = list(next(itertools.groupby(found, key=lambda notice: notice.type))[1])
        # What was sent in vain is sent again together: its number is the same.
        sent = [notice for notice in alike if notice.id <= self._sent_in_vain] or alike
        return sent, sent[-1].id

    async def _keep(self, position: int) -> None:
        await self._store.write(notices.keep, self._settings, position)

    def require(self) -> None:
        """Raises NotifyError if the program, or a variable with the URL or the key, is not there. Nothing is sent."""
        settings, why = self._settings, ""
        if settings.command is not None:
            why = "" if shutil.which(settings.command[0]) else f"{settings.command[0]} is not an executable program"
        elif not settings.target:
            why = f"the variable {settings.url_env} with the URL is not set"
        elif settings.secret_env is not None and not os.environ.get(settings.secret_env):
            why = f"the variable {settings.secret_env} with the key is not set, and nothing is sent unsigned"
        if why:
            raise self._failure(why, "Correct the entry of `notify`, or set the variable.")

    async def _send(self, sent: Sequence[Notice], /) -> None:
        body = redact_secrets(json.dumps(self._content(sent)).encode())
        try:
            self.require()
            if self._settings.command is not None:
                await self._run(self._settings.command, sent[0].type, body)
            else:
                await self._post(f"{self._alias}-{sent[0].id}-{sent[-1].id}", body)
        except NotifyError:
            self._sent_in_vain = sent[-1].id
            raise

    def _content(self, sent: Sequence[Notice]) -> dict[str, Any]:
        text = sent[0].text if len(sent) == 1 else f"{len(sent)} times {sent[0].type.value}, first: {sent[0].text}"
        if page := self._page_of(sent[0]):
            text += f" {page['url']}"
        return {
            "type": sent[0].type.value,
            "timestamp": sent[-1].at,
            "text": f"{self._alias} on {socket.gethostname()}: {text}",
            "data": {
                "alias": self._alias,
                "host": socket.gethostname(),
                "notices": [
                    {"id": each.id, "at": each.at, "subject": each.subject, "text": each.text, **self._page_of(each)}
                    for each in sent
                ],
            },
        }

    def _page_of(self, notice: Notice) -> dict[str, str]:
        """The address of the page on which a person can decide, if there is something to decide."""
        return {"url": f"{self._web_url}{notice.page}"} if notice.page else {}

    async def _post(self, number: str, body: bytes) -> None:
        url = self._settings.target or ""
        try:
            check_url(url)
        except ValueError as error:
            raise self._failure(f"of the URL in ${self._settings.url_env}: {error}") from None
        url = whole_url(url)
        async with self._client(url, self._settings.timeout_seconds) as client:
            # The status says it all: nothing else of the answer is read.
            headers = self._headers(number, body)
            answer = await client.post(url, content=body, headers=headers, extensions={"max_bytes": 0})
        if not answer.is_success:
            raise self._refusal(answer)

    def _headers(self, number: str, body: bytes) -> dict[str, str]:
        stamp = str(int(time.time()))
        headers = {"content-type": "application/json", "webhook-id": number, "webhook-timestamp": stamp}
        if (variable := self._settings.secret_env) is not None:
            headers["webhook-signature"] = signature(os.environ[variable], number, stamp, body)
        return {**headers, "user-agent": "flywheel"}

    async def _run(self, command: Sequence[str], kind: str, body: bytes) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={**environment_without_secrets(), "FLYWHEEL_NOTICE": kind},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise self._failure(getattr(error, "strerror", None) or str(error)) from None
        beat(self._settings.timeout_seconds)
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await process.communicate(body)
        except TimeoutError:
            why = f"it did not end within {self._settings.timeout_seconds:g} s and was killed"
            raise self._failure(why) from None
        finally:
            # With what it has started, also where the daemon stops.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise self._failure(f"it ended with exit code {process.returncode}")


def signature(secret: str, number: str, stamp: str, body: bytes) -> str:
    """The header `webhook-signature` of Standard Webhooks."""
    register_secret(secret)
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        with contextlib.suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    digest = hmac.new(key, f"{number}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
