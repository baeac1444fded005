"""Influence: how much of a round one conversation, one user or one query template may be. Pure.

A few per cent of poisoned samples suffice to spoil a model, and an attacker writes many alike. What is above its
share waits for a round that is large enough; it is not lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from flywheel.filtering.pattern import template
from flywheel.task import conversation_key


class Burst(BaseModel):
    """When near-identical questions from one origin are a burst."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    count: int = Field(default=20, ge=2)
    """So many near-identical questions …"""
    seconds: float = Field(default=600.0, gt=0)
    """… within this time are set aside for a person."""


class Influence(BaseModel):
    """Parameters of `influence`: shares of a round, 0…1; 1 is no cap."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    conversation: float = Field(default=0.05, gt=0, le=1)
    """Largest share of one conversation."""
    user: float = Field(default=0.20, gt=0, le=1)
    """Largest share of one user. Replies whose user is not known are not counted."""
    template: float = Field(default=0.20, gt=0, le=1)
    """Largest share of questions that differ in numbers, names and quoted parts only."""
    burst: Burst | None = Burst()
    """What a burst of near-identical questions is; null looks for none."""


@dataclass(frozen=True, slots=True)
class Weight:
    """By what a task's share is counted. `origin` is its user or, where none is known, its source."""

    conversation: str
    user: str
    template: int
    origin: str
    at: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A free sample, by what its share is counted; an empty user or template 0 is none."""

    task: int
    conversation: str
    user: str
    template: int


def weigh(line: Mapping[str, Any]) -> Weight:
    """By what the share of a task line is counted."""
    metadata = line["metadata"]
    user = str(metadata.get("user_id") or "")
    return Weight(
        conversation=conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        user=user,
        template=xxhash.xxh3_64_intdigest(template(line["main_query"]).encode("utf-8", "replace")) >> 1,
        origin=f"user {user}" if user else f"source {metadata['source']}",
        at=datetime.fromisoformat(metadata["started_at"]).timestamp(),
    )


def within_shares(candidates: Sequence[Candidate], caps: Influence, most: int) -> list[int]:
    """The tasks that a round of `most` samples at most may take, the oldest first.

    Nobody's share of what is taken is above its cap, except that one sample of each is always allowed. When the caps
    make the round smaller, the shares are counted anew.
    """
    size = min(most, len(candidates))
    while True:
        taken = _pick(candidates, caps, size)
        if len(taken) >= size:
            return taken
        size = len(taken)


def _pick(candidates: Iterable[Candidate], caps: Influence, size: int) -> list[int]:
    limits = {name: max(1, int(getattr(caps, name) * size + 1e-9)) for name in ("conversation", "user", "template")}
    counts: dict[str, Counter[object]] = {name: Counter() for name in limits}
    taken: list[int] = []
    for candidate in candidates:
        if len(taken) == size:
            break
        keys = {name: key for name in limits if (key := getattr(candidate, name))}
        if all(counts[name][key] < limits[name] for name, key in keys.items()):
            for name, key in keys.items():
                counts[name][key] += 1
            taken.append(candidate.task)
    return taken
