"""Agents say which conversation a model call belongs to, and whether it may be recorded: headers of their requests to
`flywheel serve`.

Standard library only: agents import this, and so does the server.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

CONVERSATION_HEADER: Final = "x-flywheel-conversation"
MAX_HEADER_BYTES: Final = 512
RECORD_HEADER: Final = "x-flywheel-record"
"""With one of `REFUSALS`, nothing of a request is recorded."""
REFUSALS: Final = frozenset({"no", "false", "0"})
"""What refuses recording, in the header and in the attribute `flywheel.record` of a span, in any case."""

_current: ContextVar[str] = ContextVar("flywheel_conversation", default="")

Request = TypeVar("Request", bound=Any)
"""One of httpx or httpx2."""


@contextlib.contextmanager
def conversation(conversation_id: str) -> Iterator[None]:
    """Model calls in this context, also those of tasks that begin in it, belong to the conversation.

    Clients need `conversation_header`. Raises ValueError for an empty id.
    """
    if not conversation_id.strip():
        raise ValueError("a conversation needs an id")
    token = _current.set(conversation_id)
    try:
        yield
    finally:
        _current.reset(token)


def conversation_header(request: Request) -> Request:
    """Give a request the header of the conversation, outside one none. It is the `auth` of an HTTP client, which is
    called with each request: `openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(auth=...))`.

    An id that no header can carry, or a long one, is sent as its SHA-256.
    """
    if given := _current.get():
        request.headers[CONVERSATION_HEADER] = as_header(given)
    return request


def refuses_recording(value: str) -> bool:
    """Whether a value of the header, or of the attribute `flywheel.record`, refuses recording."""
    return value.strip().lower() in REFUSALS


def forms_of(conversation_ids: Iterable[str]) -> set[str]:
    """The ids, and what the header has in their place."""
    return {form for each in conversation_ids for form in (each, as_header(each))}


def as_header(conversation_id: str) -> str:
    """The value of the header for a conversation: its id, or the SHA-256 of one that is long or that no header can
    carry."""
    given = conversation_id
    fits = given.isascii() and given.isprintable() and len(given) <= MAX_HEADER_BYTES and given == given.strip()
    return given if fits else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
