"""Of whom nothing is stored, but a count; and whom a text names that cannot be parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from flywheel.conversations import refuses_recording


class PrivateNames(Struct, frozen=True):
    """Users, conversations and agents of whom nothing is stored, by their exact names."""

    users: frozenset[str] = frozenset()
    conversations: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()

    def cover(self, *, users: Iterable[str], conversations: Iterable[str], agents: Iterable[str]) -> bool:
        """Whether one of these names is among them."""
        return not (
            self.users.isdisjoint(users)
            and self.conversations.isdisjoint(conversations)
            and self.agents.isdisjoint(agents)
        )


NOBODY = PrivateNames()


_ID: Final = r'(?P<{0}>"(?:[^"\\]|\\.)*+"|-?\d+)'
_CONVERSATION: Final = re.compile(
    r'"(?:conversation_?id|(?:[\w.]*\.)?(?:conversation|session)\.id|session_?id)"\s*:\s*' + _ID.format("id")
    + r'|"(?:conversation|session)"\s*:\s*\{[^{}]*?"id"\s*:\s*' + _ID.format("nested"),
    re.IGNORECASE,
)  # fmt: skip
_USER: Final = re.compile(
    r'"(?:(?:end)?user_?id|(?:[\w.]*\.)?(?:end)?user\.id)"\s*:\s*' + _ID.format("id")
    + r'|"(?:end)?user"\s*:\s*\{[^{}]*?"id"\s*:\s*' + _ID.format("nested"),
    re.IGNORECASE,
)  # fmt: skip


def named_in(text: str) -> tuple[list[str], list[str]]:
    """The conversations and the users that JSON names, in its order, also where it is no JSON: torn, or cut off."""
    found: tuple[list[str], list[str]] = ([], [])
    for ids, pattern in zip(found, (_CONVERSATION, _USER), strict=True):
        for match in pattern.finditer(text):
            given = match["id"] or match["nested"]
            try:
                ids.append(str(json.loads(given, strict=False)))
            except ValueError:  # an escape that is none
                ids.append(given.strip('"'))
    return found


def is_refusal(value: object) -> bool:
    """Whether the attribute `flywheel.record` of a span refuses recording: false, or a text or number for it."""
    return value is False or (isinstance(value, str | int | float) and refuses_recording(str(value)))
