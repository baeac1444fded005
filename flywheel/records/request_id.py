"""Request ids of `flywheel serve`, by which a recorded response id names the adapter that answered.

vLLM builds the id of a response from the header `X-Request-Id` (`chatcmpl-<id>`), and tracing clients record it even
if they record no model. Standard library only, because the server's middleware imports it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

BASE_VERSION: Final = "base"
"""The version for the base model, whose name can be a path that responses must not show. No adapter is named so."""
BASE_BY_ID: Final = "@base"
"""The model of a reply whose id says that the base model gave it, whatever name the request used."""
UNRECORDED: Final = "unrecorded"
"""In the place of a version: nothing says which model gave a reply."""

_ID = re.compile(r"fw-([0-9a-f]{16})-([\w.@~%-]{1,200})-([0-9a-f]{16})(?![0-9a-f])", re.ASCII)
_BEGIN = re.compile(rb"fw-[0-9a-f]{16}-")
_RECORDED = re.compile(rb'id"\s*:\s*"[\w-]{0,40}?(' + _ID.pattern.encode() + rb")", re.ASCII)


class RequestMark(NamedTuple):
    """The parts of a request id: `instance` is the server process, `version` the adapter or `BASE_VERSION`."""

    instance: str
    version: str
    random: str


def new_request_id(instance: str, version: str) -> str:
    """`fw-<instance>-<version>-<random>`; `instance` is 16 hexadecimal digits (`secrets.token_hex(8)`)."""
    return f"fw-{instance}-{quote(version, safe='@')}-{secrets.token_hex(8)}"


def request_id_in(response_id: str) -> str | None:
    """The whole request id inside a response id; None if there is none."""
    found = _ID.search(response_id)
    return found[0] if found else None


def recorded_in(row: bytes) -> list[str]:
    """The request ids inside the ids of a span as JSON: what a client records as the id of a response.

    An id in a text does not count: quotation marks are escaped there.
    """
    if _BEGIN.search(row) is None:
        # Nearly all rows end here. A search for the plain text `fw-` takes twice as long.
        return []
    return [found[1].decode() for found in _RECORDED.finditer(row)]


def mark_of(response_id: str) -> RequestMark | None:
    """The request id inside a response id; None if there is none."""
    found = _ID.search(response_id)
    return RequestMark(found[1], unquote(found[2]), found[3]) if found else None
