"""The request id that `flywheel serve` gives each request to the alias, and what a recorded response id tells again.

vLLM makes the id of an answer from the header `X-Request-Id` (`chatcmpl-<id>`), and tracing clients record that id
also where they record no model. Standard library only: the middleware of the server imports it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

BASE_VERSION: Final = "base"
"""What stands for the base model: its name can be a path, which answers should not show. No adapter is called so."""

_ID = re.compile(r"fw-([0-9a-f]{16})-([\w.@~%-]{1,200})-([0-9a-f]{16})(?![0-9a-f])", re.ASCII)


class RequestMark(NamedTuple):
    """What a request id says: `instance` is the server process, `version` the adapter or `BASE_VERSION`."""

    instance: str
    version: str
    random: str


def new_request_id(instance: str, version: str) -> str:
    """`fw-<instance>-<version>-<random>`; `instance` is 16 hexadecimal digits (`secrets.token_hex(8)`)."""
    return f"fw-{instance}-{quote(version, safe='@')}-{secrets.token_hex(8)}"


def mark_of(response_id: str) -> RequestMark | None:
    """The mark within a response id, whatever the server put around it; None where there is none."""
    found = _ID.search(response_id)
    return RequestMark(found[1], unquote(found[2]), found[3]) if found else None
