"""Of whom nothing is stored, but a count."""

from __future__ import annotations

from collections.abc import Iterable

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


def is_refusal(value: object) -> bool:
    """Whether the attribute `flywheel.record` of a span refuses recording: false, or a text or number for it."""
    return value is False or (isinstance(value, str | int | float) and refuses_recording(str(value)))
