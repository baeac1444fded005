"""Settings of whom nothing is recorded or stored."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flywheel.config.section import Section
from flywheel.records.privacy import PrivateNames

PrivateName = Annotated[str, Field(min_length=1)]


class ExcludeSettings(Section):
    users: list[PrivateName] = []
    """Users of whom only a count is stored: exact names, as requests (`user`; `metadata.user_id`) and spans
    (`user.id`) have them."""
    conversations: list[PrivateName] = []
    """Conversations of which only a count is stored: exact ids, as requests (`x-flywheel-conversation`) and spans
    have them."""
    agents: list[PrivateName] = []
    """Agents of which only a count is stored: exact names, as spans have them. Recorded calls that a trace of such
    an agent names are erased."""

    @property
    def names(self) -> PrivateNames:
        """These names, for readers."""
        return PrivateNames(*map(frozenset, (self.users, self.conversations, self.agents)))


class PrivacySettings(Section):
    exclude: ExcludeSettings = ExcludeSettings()
