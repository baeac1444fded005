"""Which version answers a request in an A/B test: that of its unit, which is a conversation if the client names it.

The arm of a unit follows from the salt of the A/B test and the request alone, so replicas agree without shared state.
Runs inside vLLM's process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from flywheel.conversations import CONVERSATION_HEADER, MAX_HEADER_BYTES
from flywheel.records.request_id import mark_of
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.calls.stored_parts import LISTS
from flywheel.system.server_limits import Scope, header

NAMED: Final = (("conversation", CONVERSATION_HEADER.encode()), ("session", b"x-litellm-session-id"))
"""The kinds of units that a header names, and that header."""
QUESTIONS: Final = (*LISTS, "prompt")
"""What holds the question, the first of them that is there."""
FOLLOWED: Final = "previous_response_id"
USER: Final = "user"
METADATA: Final = "metadata"
MEMBERS: Final = frozenset({*QUESTIONS, FOLLOWED, USER, METADATA})
"""The top-level members of a body by which a request is assigned, or its user known."""
MAX_MESSAGES: Final = 64
"""So many messages are looked at for the first one of the user."""
_MAX_SHORT: Final = 1000
"""The longest text that is decoded."""
_NOTHING: Final = msgspec.Raw()
# Not msgspec, which refuses half a surrogate pair: the unit would change in the middle of a conversation.
_value = json.JSONDecoder().raw_decode
_separator = re.compile(r"[\s,]*").match


class Assignment(NamedTuple):
    """The served model that answers, and what the call log says of the unit (see `RecordedCall`)."""

    version: str
    unit: str = ""
    kind: str = ""
    arm: str = ""


def assign(
    target: AliasTarget,
    missing: str,
    scope: Scope,
    credential: str,
    body: Mapping[str, msgspec.Raw],
    version_of: Callable[[str], str],
) -> Assignment:
    """The version of an alias for a request, of which `body` are the `members`.

    `missing` is a version that is not loaded here: the other one answers for it, and the arm stays. `version_of`
    gives what response ids say of a served model. A response that the request continues leads to its version, if that
    is one of the two, and to no arm: the client has chosen.
    """
    if target.ab_test is None:
        return Assignment(target.name)
    new, old = (each.name for each in target.versions)
    kind, parts = _key(scope, credential, body)
    digest = hashlib.blake2b(key=target.ab_test.salt.encode(), digest_size=16)
    for part in (kind.encode(), *parts):
        # With its length: no other parts have the same bytes together.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    unit, number = digest.digest()[:8].hex(), int.from_bytes(digest.digest()[8:], "big")
    arm = "new" if number < target.ab_test.share * 2**64 else "old"
    version = new if arm == "new" else old
    mark = mark_of(short_text(body.get(FOLLOWED, _NOTHING)))
    if followed := next((name for name in (new, old) if mark is not None and mark.version == version_of(name)), ""):
        version, arm = followed, ""
    if version == missing:
        version = old if missing == new else new
    return Assignment(version, unit, kind, arm)


def _key(scope: Scope, credential: str, body: Mapping[str, msgspec.Raw]) -> tuple[str, list[bytes]]:
    """The kind of the unit and what it is known by."""
    for kind, name in NAMED:
        value = header(scope, name).strip()
        if 0 < len(value) <= MAX_HEADER_BYTES:
            return kind, [value]
    texts = (credential, _raw(body, USER), _question(body))
    # Bodies may hold halves of surrogate pairs.
    return "fallback", [text.encode("utf-8", "surrogatepass") for text in texts]


def _question(body: Mapping[str, msgspec.Raw]) -> str:
    """The JSON of the first message of the user, in one form, or of the text that stands for the messages."""
    name = next((name for name in QUESTIONS if name in body), "")
    text = _raw(body, name)
    if name not in LISTS or text[:1] != "[":
        return text
    try:
        end = 1
        for _ in range(MAX_MESSAGES):
            found = _separator(text, end)
            start = found.end() if found else end
            message, end = _value(text, start)
            if isinstance(message, dict) and message.get("role") == "user":
                return json.dumps(message)
    except (ValueError, RecursionError):
        pass  # The end of the list, or the server refuses the body.
    return ""


def _raw(body: Mapping[str, msgspec.Raw], name: str) -> str:
    """The JSON of a member, empty without it."""
    # The server refuses what is no UTF-8.
    return bytes(body.get(name, _NOTHING)).decode("utf-8", "surrogateescape")


def short_text(raw: msgspec.Raw) -> str:
    """The value of a short JSON text; empty for anything else."""
    text = bytes(raw).decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text) if text[:1] == '"' and len(text) <= _MAX_SHORT else ""
    except ValueError:
        return ""
    return str(value)
