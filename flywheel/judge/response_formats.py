"""How an endpoint is asked for the verdict's format, and which formats and parameters it does not support.

`EndpointCapabilities` holds what was learned in this process; its `snapshot` can be stored. An entry expires after a
month, because servers change.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

MONTH_SECONDS: Final = 30 * 86_400.0


class ResponseFormat(StrEnum):
    """From the one that leaves the judge least freedom to the one that leaves it all."""

    SCHEMA = "schema"
    TOOL = "tool"
    TEXT = "text"


SEED: Final = "seed"
TEMPERATURE: Final = "temperature"
"""Not means but parameters; reasoning models refuse any temperature but their own."""
MAX_TOKENS: Final = "max_tokens"
"""Newer models of OpenAI want `max_completion_tokens` instead."""
SYSTEM: Final = "system"
"""The role; chat templates of some open models have none."""

_UNKNOWN: Final = r"(?:un(?:support|recogni|known|expect)|n['o]t (?:support|permit|allow|accept)|extra|deprecated)"


def _refused(name: str, *also: str) -> re.Pattern[str]:
    """A refusal of the parameter itself, and not of the value that it has."""
    said = (rf"{_UNKNOWN}.*\b{name}\b", rf"\b{name}\b.*{_UNKNOWN}", *also)
    return re.compile("|".join(said), re.IGNORECASE | re.DOTALL)


_NAMED: Final = {
    ResponseFormat.SCHEMA.value: re.compile(
        r"response_?format|json_?\s?schema|structured|guided|grammar|schema", re.I
    ),
    ResponseFormat.TOOL.value: re.compile(r"\btools?\b|tool_choice|tool-call|function", re.I),
    SEED: re.compile(r"\bseed\b", re.I),
    TEMPERATURE: _refused("temperature"),
    MAX_TOKENS: _refused("max_tokens", r"use\W+max_completion_tokens", r"max_completion_tokens\W+instead"),
    SYSTEM: _refused(
        r"system\W+(?:role|message|prompt|instruction)s?",
        r"roles must alternate",
        r"only user and assistant roles",
        r"developer instruction is not enabled",
    ),
}


_NAMED_IN_A_FAILURE: Final = {
    ResponseFormat.SCHEMA.value: re.compile(r"response_?format|json_?schema|grammar", re.I),
    ResponseFormat.TOOL.value: re.compile(r"\btools? param|tool_choice", re.I),
    TEMPERATURE: _NAMED[TEMPERATURE],
    MAX_TOKENS: _NAMED[MAX_TOKENS],
    SYSTEM: _NAMED[SYSTEM],
}
"""Servers that break where others refuse (llama.cpp, when a template raises) speak of much else that breaks."""


def names(said: str, what: str, status: int = 400) -> bool:
    """Whether a refusal is about this: a means, or a parameter."""
    pattern = (_NAMED_IN_A_FAILURE if status >= 500 else _NAMED).get(what)
    return pattern is not None and pattern.search(said) is not None


def in_request(sent: Mapping[str, Any]) -> list[str]:
    """The means and the parameters that a request has."""
    found = [parameter for parameter in (SEED, TEMPERATURE, MAX_TOKENS) if parameter in sent]
    found += [SYSTEM] if any(message["role"] == SYSTEM for message in sent["messages"]) else []
    found += [ResponseFormat.SCHEMA] if "response_format" in sent else []
    return found + ([ResponseFormat.TOOL] if "tools" in sent else [])


class EndpointCapabilities:
    """What endpoints refused or ignored, by endpoint and model. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._known: dict[str, dict[str, float]] = {}
        self._now = now
        self._lock = threading.Lock()

    def lacks(self, endpoint: str, what: str) -> bool:
        # Without the lock: it is asked several times for every call, and a mapping is only ever replaced or added to.
        since = self._known.get(endpoint, {}).get(what)
        return since is not None and since + MONTH_SECONDS > self._now()

    def means(self, endpoint: str) -> list[ResponseFormat]:
        """The means that are left, the best first; words always are."""
        return [means for means in ResponseFormat if means is ResponseFormat.TEXT or not self.lacks(endpoint, means)]

    def note(self, endpoint: str, what: str) -> bool:
        """The endpoint does not do this; whether that is news."""
        if self.lacks(endpoint, what):
            return False
        with self._lock:
            self._known.setdefault(endpoint, {})[what] = self._now()
            return True

    def snapshot(self) -> str:
        """All of it, to be stored."""
        with self._lock:
            return json.dumps(self._known, sort_keys=True)

    def restore(self, snapshot: str) -> None:
        """Take over what was stored. What is no snapshot is nothing."""
        try:
            stored = json.loads(snapshot or "{}")
            known = {str(at): {str(k): float(since) for k, since in each.items()} for at, each in stored.items()}
        except (ValueError, TypeError, AttributeError):
            return
        with self._lock:
            self._known = {at: {**each, **self._known.get(at, {})} for at, each in known.items()} | {
                at: each for at, each in self._known.items() if at not in known
            }
