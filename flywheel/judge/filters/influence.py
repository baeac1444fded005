"""The filter `influence`: limits the share of a round that one conversation, user or query template can have.

A few per cent of poisoned samples can spoil a model, and an attacker writes many similar ones. Samples above a limit
wait for a larger round. If there are too few conversations or users for a round, the limits are widened, unless the
chain forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import xxhash
from pydantic import Field

from flywheel.config.section import Section
from flywheel.judge.filters.deduplication import template
from flywheel.records.task import conversation_key


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


@dataclass(frozen=True, slots=True)
class Weight:
    """What a task counts towards."""

    conversation: str
    user: str
    template: int
    """Hash of the query template."""
    origin: str
    """The user or, if unknown, the source."""
    at: float
    """When it was asked: seconds since 1970."""


def weigh(line: Mapping[str, Any]) -> Weight:
    """What a task line counts towards."""
    metadata = line["metadata"]
    user = str(metadata.get("user_id") or "")
    return Weight(
        conversation=conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        user=user,
        template=xxhash.xxh3_64_intdigest(template(line["main_query"]).encode("utf-8", "replace")) >> 1,
        origin=f"user {user}" if user else f"source {metadata['source']}",
        at=datetime.fromisoformat(metadata["started_at"]).timestamp(),
    )
