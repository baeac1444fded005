"""Who sends a request, as far as it says so, and whether it may be recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from flywheel.conversations import CONVERSATION_HEADER, MAX_HEADER_BYTES, RECORD_HEADER, forms_of, refuses_recording
from flywheel.serving import routes
from flywheel.serving.server.asgi import members
from flywheel.serving.server.version_assignment import METADATA, USER, short_text
from flywheel.system.server_limits import Scope, header


class Caller(NamedTuple):
    """What a request names; each may be empty."""

    conversation: str
    user: str


def caller_of(scope: Scope, path: str, body: Mapping[str, msgspec.Raw]) -> Caller:
    """The conversation in the header, and `user` of the body (`metadata.user_id` of requests for messages), if it is
    a short text. `body` are its `members`."""
    value = header(scope, CONVERSATION_HEADER.encode()).strip()
    named = value.decode("utf-8", "replace") if len(value) <= MAX_HEADER_BYTES else ""
    raw = body.get(USER, msgspec.Raw())
    if path == routes.MESSAGES and METADATA in body:
        raw = members(bytes(body[METADATA])).get("user_id", raw)
    # Halves of surrogate pairs cannot be stored.
    user = short_text(raw)
    return Caller(named, user.encode("utf-8", "replace").decode())


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
