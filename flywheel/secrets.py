"""Secrets that this process knows. They are removed from external texts and withheld from user functions.

An endpoint, a server, a user function or a log can repeat the key that it received, and its text becomes an error in
the log, in the state and in `status`. Known secrets are the values of environment variables that the configuration
names, the values of variables with a name like API_KEY or PASSWORD, and every value passed to `register_secret`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, AnyStr, Final
from urllib.parse import quote, unquote

REDACTED: Final = "[secret]"
MIN_CHARACTERS: Final = 8
"""Shorter values are placeholders (`EMPTY`, `none`) that must not be redacted from other texts."""
_NAMES: Final = re.compile(r"(?:^|_)(?:API_?KEYS?|ACCESS_KEY|SECRET|SECRET_KEY|TOKEN|PASSWORD)$", re.IGNORECASE)

_VALUES: Final = re.compile(r"(?:^|[|\s])(?:sk|pk|hf|ghp|xox[bp]|AKIA)[-_]?[\w-]{16,}|://[^/\s@]*:[^/\s@]+@")
"""How the keys of common services begin, and passwords in addresses."""

URL_USERS: Final = "FLYWHEEL_URLS_SECRET"
"""The variable with the names and passwords of URLs, by scheme, mask and host, as JSON. As one of a secret, it is
withheld from users' functions."""
_USER_INFO: Final = re.compile(r"(?P<scheme>https?://)(?P<user>[^/?#\s]+)@(?P<host>[^/?#\s@]*)", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ARGUMENT: Final = re.compile(r"\A(--[\w-]*(?:key|token|secret|password))(?:=(.*))?", re.IGNORECASE)
_MASK: Final = re.compile(r"\*\*\*\d*")
_IN_TEXT: Final = re.compile(rb"(?<=://)[^/?#\s\"'<>]+(?=@)")

_variables: set[str] = set()
_values: set[str] = set()


def register_secret_variable(name: str) -> None:
    """The environment variable of this name holds a secret, or several as `k1|k2`."""
    _variables.add(name)


def register_secret(secret: str) -> None:
    """This value is a secret, wherever it came from."""
    _values.add(secret)


def redact_secrets(text: AnyStr) -> AnyStr:
    """Replace the known secrets, also where they are escaped for JSON or a URL."""
    # Of a copy: other threads may add to the set.
    values = _values.copy().union(os.environ.get(name, "") for name in os.environ if _is_secret(name))
    for secret in _spellings(frozenset(values)):
        if isinstance(text, bytes):
            text = text.replace(secret.encode(), REDACTED.encode())
        else:
            text = text.replace(secret, REDACTED)
    return text


def without_secrets(value: Any, name: str = "") -> Any:
    """Parsed YAML or JSON with None in place of texts whose key is named like one of a secret, or that look like
    one."""
    if isinstance(value, Mapping):
        return {key: without_secrets(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [without_secrets(each, name) for each in value]
    is_secret = isinstance(value, str) and (_NAMES.search(name) or _VALUES.search(value))
    return None if is_secret or (isinstance(value, str) and redact_secrets(value) != value) else value


def masked(value: Any) -> Any:
    """A value for JSON without keys: known secrets, credentials in URLs, and arguments that name a key or token."""
    if isinstance(value, str | Path):
        return redact_secrets(_USER.sub(REDACTED, str(value)))
    if isinstance(value, Mapping):
        return {key: masked(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value if isinstance(value, int | float | None) else str(value)
    items, is_secret = [], False
    for item in value:
        match = _ARGUMENT.fullmatch(item) if isinstance(item, str) else None
        if match is not None and match[2] is not None:
            items.append(f"{match[1]}={REDACTED}")
        else:
            items.append(REDACTED if is_secret else masked(item))
        is_secret = match is not None and match[2] is None
    return items


def masked_url(url: str) -> str:
    """A URL with `***` in place of the name and password in it, which `whole_url` puts back for requests. With
    another name or password, a number follows the mask. Child processes of this one know them, too."""
    if (found := _USER_INFO.match(url)) is None or _MASK.fullmatch(found["user"]):
        return url
    known = _users()
    for number in itertools.count(1):
        mask = "***" if number == 1 else f"***{number}"
        masked = f"{found['scheme']}{mask}@{found['host']}"
        if known.setdefault(masked, found["user"]) == found["user"]:
            break
    register_secret(found["user"])
    register_secret(unquote(found["user"].partition(":")[2]))
    os.environ[URL_USERS] = json.dumps(known)
    return masked + url[found.end() :]


def whole_url(url: str) -> str:
    """A URL with the name and password that `masked_url` removed."""
    found = _USER_INFO.match(url)
    if found is None or (user := _users().get(found[0])) is None:
        return url
    return f"{found['scheme']}{user}@{found['host']}{url[found.end() :]}"


def masked_urls(text: bytes) -> bytes:
    """A text in which names and passwords in URLs are masked for good."""
    return _IN_TEXT.sub(b"***", text)


def _users() -> dict[str, str]:
    users: dict[str, str] = json.loads(os.environ.get(URL_USERS) or "{}")
    return users


def keys_in(text: str) -> list[str]:
    """The keys in a variable, which may hold several as `k1|k2`."""
    return [key for part in text.split("|") if (key := part.strip())]


def is_sendable(key: str) -> bool:
    """Whether a header of HTTP can hold a key."""
    return key.isascii() and key.isprintable()


def environment_without_secrets() -> dict[str, str]:
    """The environment of this process for programs that must not see any secret."""
    return {name: value for name, value in os.environ.items() if not _is_secret(name)}


def _is_secret(name: str) -> bool:
    return name in _variables or _NAMES.search(name) is not None


@lru_cache(maxsize=16)
def _spellings(values: frozenset[str]) -> list[str]:
    """Every secret as text, in JSON and in a URL, the longest first: one may be part of another."""
    parts = {part.strip() for value in values for part in (value, *value.split("|"))}
    secrets = [part for part in parts if len(part) >= MIN_CHARACTERS]
    found = {text for secret in secrets for text in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))}
    return sorted(found, key=len, reverse=True)
