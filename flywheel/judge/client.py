"""The judge as somebody to ask: by the best means that its endpoint has, and the backup while it is away."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge.completion import TOOL_NAME, Reply
from flywheel.judge.endpoint import OPENAI_URL, THIS_CALL, Endpoint, Who
from flywheel.judge.response_errors import CallError
from flywheel.judge.response_formats import (
    MAX_TOKENS,
    SEED,
    SYSTEM,
    TEMPERATURE,
    Learned,
    Means,
    in_request,
    names,
)
from flywheel.rubric import ALIEN, Rubric
from flywheel.trace import ChatMessage

log = logging.getLogger(__name__)

NEVER: Final = threading.Event()
"""The stop that does not come."""
AWAY_SECONDS: Final = 60.0
"""How long the backup is asked first after the judge failed."""
UNTOLD: Final = frozenset({400, 422})
"""Answers that may be about how we asked, whatever they say."""
NOT_TAKEN: Final = UNTOLD | {404, 405, 415}
"""Answers that are about how we asked if they name it."""


def judge_of(rubric: Rubric, settings: JudgeSettings) -> JudgeSettings:
    """The judge that a rubric is judged by: the one of the configuration, or another model at its endpoint."""
    named = rubric.judge.model
    return settings if named == ALIEN else settings.model_copy(update={"model": named})


def judges(settings: JudgeSettings) -> list[Who]:
    """Who is asked, the backup last."""
    url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
    asked = [Who(settings.model, url, settings.api_key_env)]
    if backup := settings.backup:
        url = (backup.base_url or url).rstrip("/")
        asked.append(Who(backup.model or settings.model, url, backup.api_key_env, "judge.backup"))
    return asked


class JudgeClient:
    """Asks the judge. Thread-safe; `learned` remembers what its endpoints turned out not to do."""

    def __init__(
        self,
        settings: JudgeSettings,
        learned: Learned | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.learned = learned or Learned()
        self._endpoints = [Endpoint(who, settings) for who in judges(settings)]
        self.base_url = self._endpoints[0].who.base_url
        self._clock = clock
        self._away_until = float("-inf")

    @property
    def identity(self) -> str:
        """What answers: a verdict of another model is another verdict."""
        return "\0".join(f"{endpoint.who.base_url}\0{endpoint.who.model}" for endpoint in self._endpoints)

    def ask(
        self,
        messages: list[ChatMessage],
        *,
        response_format: dict[str, Any],
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
        stop: threading.Event = NEVER,
    ) -> Reply:
        """One answer; when the endpoint does not take just this call, a Reply with a problem.

        Raises JudgeError: retryable when the endpoint failed at every attempt (`stop` ends the attempts), not
        retryable when it refuses us.
        """
        wanted: dict[str, Any] = {"messages": messages, "temperature": temperature, "max_tokens": max_tokens}
        if seed is not None:
            wanted["seed"] = seed
        first: JudgeError | None = None
        for endpoint in self._in_order():
            try:
                return self._ask(endpoint, wanted, response_format, stop)
            except JudgeError as error:
                if len(self._endpoints) == 1 or stop.is_set():
                    raise
                if endpoint is self._endpoints[0]:
                    self._away_until = self._clock() + AWAY_SECONDS
                    log.warning("%s", error)
                first = error if first is None or endpoint is self._endpoints[0] else first
        assert first is not None
        raise first

    def ignored(self, reply: Reply) -> bool:
        """The reply did not come as it was asked for: the next is asked for by other means, if there are any left."""
        endpoint = next((each for each in self._endpoints if str(each.who) == reply.judge), None)
        if endpoint is None or reply.means is Means.TEXT:
            return False
        self._note(endpoint, reply.means, "ignores")
        return True

    def _in_order(self) -> Iterator[Endpoint]:
        away = self._clock() < self._away_until
        yield from reversed(self._endpoints) if away else self._endpoints

    def _ask(
        self, endpoint: Endpoint, wanted: dict[str, Any], response_format: dict[str, Any], stop: threading.Event
    ) -> Reply:
        """By the best means that is left. A refusal that names one is learned; after any other, words are tried."""
        left = self.learned.means(str(endpoint.who))
        suspected: Means | None = None
        while True:
            means = left.pop(0)
            try:
                reply = self._call(endpoint, {**wanted, **_form(means, response_format)}, stop)
            except CallError as error:
                named = _is_refusal(error.status, NOT_TAKEN) and names(error.said, means, error.status)
                about_us = named or (error.status in UNTOLD and not THIS_CALL.search(error.said))
                if means is Means.TEXT or not about_us:
                    return endpoint.refused(error)
                if named:
                    self._note(endpoint, means, "takes no")
                else:
                    left, suspected = [Means.TEXT], means
                continue
            if suspected is not None:
                self._note(endpoint, suspected, "takes no")
            return replace(reply, means=means)

    def _call(self, endpoint: Endpoint, wanted: dict[str, Any], stop: threading.Event) -> Reply:
        """One request, without the parameters that the endpoint does not know."""
        while True:
            sent = self._known_to(endpoint, wanted)
            try:
                return endpoint.call(sent, stop)
            except CallError as error:
                known = (each for each in in_request(sent) if each in _PARAMETERS)
                unknown = next((each for each in known if names(error.said, each, error.status)), None)
                if unknown is None or not _is_refusal(error.status, UNTOLD):
                    raise
                self._note(endpoint, unknown, "takes no")

    def _known_to(self, endpoint: Endpoint, wanted: dict[str, Any]) -> dict[str, Any]:
        sent = dict(wanted)
        for parameter in (SEED, TEMPERATURE):
            if self.learned.lacks(str(endpoint.who), parameter):
                sent.pop(parameter, None)
        if self.learned.lacks(str(endpoint.who), SYSTEM):
            sent["messages"] = _without_system(sent["messages"])
        if self.learned.lacks(str(endpoint.who), MAX_TOKENS):
            sent["max_completion_tokens"] = sent.pop(MAX_TOKENS)
        return sent

    def _note(self, endpoint: Endpoint, what: str, does: str) -> None:
        if self.learned.note(str(endpoint.who), what):
            log.info("%s %s %s: it is asked without from now on", endpoint.who, does, _NAMES[what])

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


_PARAMETERS: Final = (SEED, TEMPERATURE, MAX_TOKENS, SYSTEM)
_NAMES: Final = {
    Means.SCHEMA: "JSON schema",
    Means.TOOL: "tool call",
    SEED: "seed",
    TEMPERATURE: "temperature",
    MAX_TOKENS: "max_tokens",
    SYSTEM: "system message",
}


def _is_refusal(status: int, statuses: frozenset[int]) -> bool:
    return status in statuses or status >= 500


def _without_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The same messages as one of the user."""
    return [{"role": "user", "content": "\n\n".join(str(message["content"]) for message in messages)}]


def _form(means: Means, response_format: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that asks for the reply's form."""
    if means is Means.SCHEMA:
        return {"response_format": response_format}
    if means is Means.TEXT:
        return {}
    parameters = response_format["json_schema"]["schema"]
    function = {"name": TOOL_NAME, "description": "Give the verdict.", "parameters": parameters, "strict": True}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": TOOL_NAME}},
    }
