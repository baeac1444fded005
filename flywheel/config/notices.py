"""Settings of notices: which events are sent to whom."""

from __future__ import annotations

import json
import os
import shlex
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flywheel.config.section import Section, WebUrl


class NoticeType(StrEnum):
    """What notices are about."""

    PASSED = "passed"
    PROMOTED = "promoted"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    WATCH_INCONCLUSIVE = "watch_inconclusive"
    JUDGE_FAILING = "judge_failing"
    BUDGET_SPENT = "budget_spent"
    DEAD_LETTERS = "dead_letters"
    SOURCE_ERROR = "source_error"


def _words(command: object) -> object:
    return shlex.split(command) if isinstance(command, str) else command


class NotifySettings(Section):
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the entry. Undelivered notices belong to the name, whatever its URL or command becomes."""
    url: WebUrl | None = None
    """A webhook, which gets notices by POST."""
    url_env: str | None = None
    """Environment variable with the webhook's URL, if that is a secret."""
    secret_env: str | None = None
    """Environment variable with the key that signs notices (Standard Webhooks: `webhook-signature`)."""
    command: Annotated[list[str], Field(min_length=1), BeforeValidator(_words)] | None = None
    """A program with its arguments, which gets a notice as JSON on standard input. It has no shell and no keys. Exit
    code 0: delivered."""
    on: list[NoticeType] = Field(min_length=1)
    """What to notify of: `passed` (a candidate waits for a person), `promoted`, `rejected`, `rolled_back`,
    `watch_inconclusive` (a canary cannot be decided), `judge_failing`, `budget_spent`, `dead_letters`,
    `source_error`."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Timeout of one attempt."""

    @model_validator(mode="before")
    @classmethod
    def _key_on(cls, raw: object) -> object:
        """YAML 1.1 takes the key `on` for true."""
        return {"on" if key is True else key: value for key, value in raw.items()} if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if sum(way is not None for way in (self.url, self.url_env, self.command)) != 1:
            raise ValueError("it needs one of url, url_env and command")
        if self.command is not None and self.secret_env is not None:
            raise ValueError("secret_env signs what is sent to a webhook, and this is a command")
        return self

    @property
    def way(self) -> str:
        """Identifies where notices go."""
        return json.dumps([self.url, self.url_env, self.command])

    @property
    def target(self) -> str | None:
        """The URL; None for a command, and while the variable is not set."""
        return self.url or (os.environ.get(self.url_env) if self.url_env else None)


def _each_once(entries: list[NotifySettings]) -> list[NotifySettings]:
    if len({entry.way for entry in entries}) < len(entries):
        raise ValueError("two entries have the same url, url_env or command: list all its notices in one `on`")
    named = [entry.name for entry in entries if entry.name is not None]
    if len(set(named)) < len(named):
        raise ValueError("two entries have the same name")
    return entries


NotifyList = Annotated[list[NotifySettings], AfterValidator(_each_once)]
