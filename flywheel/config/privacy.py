"""Settings of whom nothing is recorded or stored."""

from __future__ import annotations

from flywheel.config.section import Section
from flywheel.records.privacy import PrivateNames


class ExcludeSettings(Section):
    users: list[str] = []
    """Users of whom nothing is recorded or stored, but a count: exact names, as requests (`user`; `metadata.user_id`)
    and spans (`user.id`) have them."""
    conversations: list[str] = []
    """Conversations of which nothing is recorded or stored, but a count: exact ids, as requests
    (`x-flywheel-conversation`) and spans have them."""
    agents: list[str] = []
    """Agents of which nothing is stored, but a count: exact names, as spans have them. Recorded calls that a trace of
    such an agent names are erased. Replies of an agent that is only in `ingest.agents.exclude` are stored, and become
    no tasks."""

    @property
    def names(self) -> PrivateNames:
        """These names, for readers."""
        return PrivateNames(*map(frozenset, (self.users, self.conversations, self.agents)))


class PrivacySettings(Section):
    exclude: ExcludeSettings = ExcludeSettings()
