"""The secrets that this process knows: they are taken out of texts from outside, and no user's function gets them.

An endpoint, a server, a function or a log may repeat the key that it was sent, and what they say becomes an error in
the log, in the state and in `status`. Known are the values of the environment variables that the configuration names
and of those whose names say so, and whatever else was sent as a key.
"""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from typing import AnyStr, Final
from urllib.parse import quote

HIDDEN: Final = "[secret]"
SHORTEST: Final = 8
"""Characters that a secret has at least. What stands for none (`EMPTY`, `none`) must not be hidden in other texts."""
_NAMES: Final = re.compile(r"(?:^|_)(?:API_?KEYS?|ACCESS_KEY|SECRET|SECRET_KEY|TOKEN|PASSWORD)$", re.IGNORECASE)

_variables: set[str] = set()
_values: set[str] = set()


def register_secret_variable(name: str) -> None:
    """An environment variable of this name holds a secret, or several as `k1|k2`."""
    _variables.add(name)


def know(secret: str) -> None:
    """This is a secret, wherever it came from."""
    _values.add(secret)


def hidden(text: AnyStr) -> AnyStr:
    """The text without the known secrets, also as JSON and addresses spell them."""
    for secret in _spelled():
        if isinstance(text, bytes):
            text = text.replace(secret.encode(), HIDDEN.encode())
        else:
            text = text.replace(secret, HIDDEN)
    return text


def environment() -> dict[str, str]:
    """The environment of this process without what holds a secret, for programs that are not to know any."""
    return {name: value for name, value in os.environ.items() if not _is_secret(name)}


def _is_secret(name: str) -> bool:
    return name in _variables or _NAMES.search(name) is not None


def _spelled() -> list[str]:
    """All spellings of all secrets, the longest first: one may be a part of another."""
    held = [value for name, value in os.environ.items() if _is_secret(name)]
    found = {part.strip() for value in (*held, *tuple(_values)) for part in (value, *value.split("|"))}
    long = (secret for secret in found if len(secret) >= SHORTEST)
    return _ways(frozenset(long))


@lru_cache(maxsize=16)
def _ways(secrets: frozenset[str]) -> list[str]:
    ways = {way for secret in secrets for way in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))}
    return sorted(ways, key=len, reverse=True)
