"""Influence: how much of a round one conversation, one user or one query template may be. Pure.

A few per cent of poisoned samples suffice to spoil a model, and an attacker writes many alike. What is above its
share waits for a round that is large enough; it is not lost. Where too few conversations or users are there for a
round, shares are widened, unless the chain says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from flywheel.filtering.query_template import template
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
    template: float = Field(default=1.0, gt=0, le=1)
    """Largest share of questions that differ in numbers, names and quoted parts only."""
    burst: Burst | None = None
    """What a burst of near-identical questions is, all of which waits for a person; null looks for none."""
    widen: bool = True
    """Whether shares are widened, as far as needed, where too few conversations, users or templates are there to
    fill a round. Without it the round waits."""


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The tasks that a round may take, the oldest first, and the shares that had to be widened for that, by name."""

    tasks: Sequence[int]
    widened: Mapping[str, float] = field(default_factory=dict)


SHARES: Final = ("conversation", "user", "template")


def choose(candidates: Sequence[Candidate], caps: Influence, most: int, needed: int) -> Choice:
    """The tasks that a round of `most` samples at most may take when it needs `needed`, or all there are if fewer."""
    taken = within_shares(candidates, caps, most)
    needed = min(needed, most, len(candidates))
    if len(taken) >= needed or not caps.widen:
        return Choice(taken)
    limits = {name: max(limit, _filling(candidates, name, needed)) for name, limit in _limits(caps, needed).items()}

    def with_more(extra: int) -> list[int]:
        return _pick(candidates, {name: limit + extra for name, limit in limits.items()}, needed)

    # Each share may suffice by itself, and not beside the others.
    extra = bisect_left(range(needed), needed, key=lambda extra: len(with_more(extra)))
    shares = {name: min(1.0, (limit + extra) / needed) for name, limit in limits.items()}
    widened = {name: share for name, share in shares.items() if share > getattr(caps, name)}
    # With these shares a round can be larger than it needs to be.
    larger = within_shares(candidates, caps.model_copy(update=widened), most)
    return Choice(max(larger, with_more(extra), key=len), widened)


def within_shares(candidates: Sequence[Candidate], caps: Influence, most: int) -> list[int]:
    """The tasks that a round of `most` samples at most may take, the oldest first.

    Nobody's share of what is taken is above its cap, except that one sample of each is always allowed. When the caps
    make the round smaller, the shares are counted anew.
    """
    size = min(most, len(candidates))
    while True:
        taken = _pick(candidates, _limits(caps, size), size)
        if len(taken) >= size:
            return taken
        size = len(taken)


def _limits(caps: Influence, size: int) -> dict[str, int]:
    """How many samples of a round of this size each one may be."""
    return {name: max(1, int(getattr(caps, name) * size + 1e-9)) for name in SHARES}


def _filling(candidates: Sequence[Candidate], name: str, size: int) -> int:
    """The least limit by which the candidates make a round of this size, were it the only one."""
    counts = Counter(key for candidate in candidates if (key := getattr(candidate, name)))
    free = len(candidates) - counts.total()
    return bisect_left(range(size), size, key=lambda limit: free + sum(min(n, limit) for n in counts.values()))


def _pick(candidates: Iterable[Candidate], limits: Mapping[str, int], size: int) -> list[int]:
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
