"""Sends notices (`notify`) to webhooks and commands, from the events of the state: at least once, in their order.

Each target has a position of its own among the events, stored when a notice has arrived. A target that does not
answer delays neither the others nor the daemon; it is tried again after a growing time, and after a restart. What is
sent is read from the state before each attempt, so that nothing is sent that was erased before it.

What is sent follows Standard Webhooks: https://github.com/standard-webhooks/standard-webhooks
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
from collections.abc import Sequence
from typing import Any, Final
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

log = logging.getLogger(__name__)

EVENTS_AT_ONCE: Final = 2_000
"""Events that are read in one transaction."""
NOTICES_AT_ONCE: Final = 100
"""Notices of the same type that are sent together."""
STORED_AFTER: Final = 20_000
"""A position that no notice moved is stored after this many events."""
LONGEST_WAIT_SECONDS: Final = 3600.0
WAITS: Final = 5.0, LONGEST_WAIT_SECONDS
"""After a failure, at first and at most."""
SECRET_PREFIX: Final = "whsec_"
"""Marks a key in base64; other keys are used as they are."""


class Target(ABC):
    """What the daemon sends to."""

    @abstractmethod
    async def begin(self) -> None:
        """Find the position among the events. A new target is not told of what happened before."""

    @abstractmethod
    async def deliver(self) -> Pass:
        """Send what is new. Raises NotifyError; what did not arrive is sent by the next call."""


async def resume(store: Store, config: Config) -> None:
    """Find the position of each entry of `notify`, before its target begins."""
    if dropped := await store.write(notices.resume, config.notify):
        log.warning(
            "%s dropped: the entry of `notify` that they waited for is not there any more",
            quantity(dropped, "notice"),
        )


class NoticeTarget(Target):
    """One entry of `notify`."""

    def __init__(self, store: Store, config: Config, settings: NotifySettings) -> None:
        self._store = store
        self._alias = "+".join(config.aliases)
        self._web_url = config.deploy.web_url.rstrip("/")
        self._settings = settings
        self._position = self._stored = 0
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

    async def deliver(self) -> Pass:
        wanted, result = frozenset(self._settings.on), Pass.IDLE
        while True:
            # Read again before each attempt: what was erased since is not sent.
            limits = {"limit": EVENTS_AT_ONCE, "most": NOTICES_AT_ONCE}
            found, end = await self._store.read(notices.after, self._position, wanted, **limits)
            if found:
                alike = list(next(itertools.groupby(found, key=lambda notice: notice.type))[1])
                # What was sent in vain is sent again together: its number is the same.
                sent = [notice for notice in alike if notice.id <= self._sent_in_vain] or alike
                await self._send(sent)
                await self._keep(sent[-1].id)
                result = Pass.WORKED
                continue
            if end == self._position:
                return result
            self._position = end
            if self._position - self._stored > STORED_AFTER:
                await self._keep(self._position)

    async def _keep(self, position: int) -> None:
        await self._store.write(notices.keep, self._settings, position)
        self._position = self._stored = position

    def require(self) -> None:
        """Raises NotifyError if the program, or a variable with the URL or the key, is not there. Nothing is sent."""
        settings, hint = self._settings, "Correct the entry of `notify`, or set the variable."
        why = ""
        if settings.command is not None:
            why = "" if shutil.which(settings.command[0]) else f"{settings.command[0]} is no program that can be run"
        elif not settings.target:
            why = f"the variable {settings.url_env} with the URL is not set"
        elif settings.secret_env is not None and not os.environ.get(settings.secret_env):
            why = f"the variable {settings.secret_env} with the key is not set, and nothing is sent unsigned"
        if why:
            raise NotifyError(f"notify {self}", why, hint)

    async def _send(self, sent: list[Notice]) -> None:
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
        import httpx2

        from flywheel.system.http_client import async_client

        attempted, hint = f"notify {self}", "It is tried again; correct the entry of `notify`, or the receiver."
        url = self._settings.target or ""
        try:
            check_url(url)
        except ValueError as error:
            raise NotifyError(attempted, f"of the URL in ${self._settings.url_env}: {error}", hint) from None
        url = whole_url(url)
        timeout = self._settings.timeout_seconds
        try:
            async with async_client(url, seconds=timeout, proxies=True) as client:
                # The status says it all: nothing else of the answer is read.
                headers = self._headers(number, body)
                answer = await client.post(url, content=body, headers=headers, extensions={"max_bytes": 0})
        except httpx2.TimeoutException:
            raise NotifyError(attempted, f"no answer within {timeout:g} s", hint) from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise NotifyError(attempted, why.replace(url, "the URL"), hint) from None
        if not answer.is_success:
            raise NotifyError(attempted, f"it answered {answer.status_code}", hint)

    def _headers(self, number: str, body: bytes) -> dict[str, str]:
        stamp = str(int(time.time()))
        headers = {"content-type": "application/json", "webhook-id": number, "webhook-timestamp": stamp}
        if (variable := self._settings.secret_env) is not None:
            headers["webhook-signature"] = signature(os.environ[variable], number, stamp, body)
        return {**headers, "user-agent": "flywheel"}

    async def _run(self, command: Sequence[str], kind: str, body: bytes) -> None:
        attempted, hint = f"notify {self}", "It is tried again; correct the entry of `notify`, or the program."
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
            raise NotifyError(attempted, getattr(error, "strerror", None) or str(error), hint) from None
        beat(self._settings.timeout_seconds)
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await process.communicate(body)
        except TimeoutError:
            why = f"it did not end within {self._settings.timeout_seconds:g} s and was killed"
            raise NotifyError(attempted, why, hint) from None
        finally:
            # With what it has started, also where the daemon stops.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise NotifyError(attempted, f"it ended with exit code {process.returncode}", hint)


def signature(secret: str, number: str, stamp: str, body: bytes) -> str:
    """The header `webhook-signature` of Standard Webhooks."""
    register_secret(secret)
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        with contextlib.suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    digest = hmac.new(key, f"{number}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
