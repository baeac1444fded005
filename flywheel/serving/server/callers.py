"""Who sends a request, as far as it says so, and whether it may be recorded.

Runs inside vLLM's process; only the standard library is imported, and modules that do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from flywheel.conversations import CONVERSATION_HEADER, MAX_HEADER_BYTES, RECORD_HEADER, forms_of, refuses_recording
from flywheel.serving import routes
from flywheel.serving.calls.request_parts import JsonScan
from flywheel.serving.server.units import METADATA, USER, RequestText, short_text
from flywheel.system.server_limits import Scope, header

_USER_ID: Final = "user_id"


class Caller(NamedTuple):
    """What a request names; each may be empty."""

    conversation: str
    user: str


def caller_of(scope: Scope, path: str, body: RequestText) -> Caller:
    """The conversation in the header, and `user` of the body (`metadata.user_id` of requests for messages), if it is
    a short text."""
    value = header(scope, CONVERSATION_HEADER.encode()).strip()
    named = value.decode("utf-8", "replace") if len(value) <= MAX_HEADER_BYTES else ""
    raw = body.raw(USER)
    if path == routes.MESSAGES:
        metadata = body.raw(METADATA)
        with contextlib.suppress(ValueError, IndexError):
            raw = next((metadata[a:b] for key, a, b in JsonScan(metadata).members() if key == _USER_ID), raw)
    # Halves of surrogate pairs cannot be stored.
    return Caller(named, short_text(raw).encode("utf-8", "replace").decode())


class Exclusions:
    """The users and conversations of whom nothing is recorded."""

    def __init__(self, users: Iterable[str] = (), conversations: Collection[str] = ()) -> None:
        self._users = frozenset(users)
        self._conversations = frozenset(forms_of(conversations))

    def refuse(self, scope: Scope, caller: Caller) -> bool:
        """Whether nothing of a request may be recorded: its header says so, or it is of somebody who is excluded."""
        name = RECORD_HEADER.encode()
        values = (value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name)
        return (
            any(map(refuses_recording, values))
            or caller.user in self._users
            or caller.conversation in self._conversations
        )
