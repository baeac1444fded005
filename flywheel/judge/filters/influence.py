"""The filter `influence`: limits the share of a round that one conversation, user or query template can have.

A few per cent of poisoned samples can spoil a model, and an attacker writes many similar ones. Samples above a limit
wait for a larger round. If there are too few conversations or users for a round, the limits are widened, unless the
chain forbids it.
"""

from __future__ import annotations

from pydantic import Field

from flywheel.config.section import Section


class Burst(Section):
    """When near-identical questions from one user or source are a burst."""

    count: int = Field(default=20, ge=2)
    """At least this many near-identical questions …"""
    seconds: float = Field(default=600.0, gt=0)
    """… within this time wait for a person."""


class Influence(Section):
    """Parameters of `influence`: largest shares of a round, 0…1; 1 is no limit."""

    conversation: float = Field(default=0.05, gt=0, le=1)
    """Largest share of one conversation."""
    user: float = Field(default=0.20, gt=0, le=1)
    """Largest share of one user. Replies of unknown users have no limit."""
    template: float = Field(default=1.0, gt=0, le=1)
    """Largest share of questions that differ only in numbers, names and quotations."""
    burst: Burst | None = None
    """Bursts of near-identical questions wait for a person; null detects none."""
    widen: bool = True
    """Widen limits as far as needed if there are too few conversations, users or templates for a round. If false, the
    round waits."""
