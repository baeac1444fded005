"""The filter `influence`: limits the share of a round that one conversation, user or query template can have.

A few per cent of poisoned samples can spoil a model, and an attacker writes many similar ones. Samples above a limit
wait for a larger round. If there are too few conversations or users for a round, the limits are widened, unless the
chain forbids it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class WeighedSample:
    """A free sample and what it counts towards. An empty user and template 0 are not counted."""

    task: int
    conversation: str
    user: str
    template: int


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


@dataclass(frozen=True, slots=True)
class Choice:
    """What a round can take."""

    tasks: Sequence[int]
    """Tasks, the oldest first."""
    widened: Mapping[str, float] = field(default_factory=dict)
    """The limits that were widened, by name."""


SHARES: Final = ("conversation", "user", "template")


def choose(candidates: Sequence[WeighedSample], caps: Influence, most: int, needed: int) -> Choice:
    """Choose tasks for a round of at most `most` samples that needs `needed`, or all there are if fewer."""
    taken = within_shares(candidates, caps, most)
    needed = min(needed, most, len(candidates))
    if len(taken) >= needed or not caps.widen:
        return Choice(taken)
    limits = {name: max(limit, _filling(candidates, name, needed)) for name, limit in _limits(caps, needed).items()}

    def with_more(extra: int) -> list[int]:
        return _pick(candidates, {name: limit + extra for name, limit in limits.items()}, needed)

    # Each limit can suffice alone, and not together with the others.
    extra = bisect_left(range(needed), needed, key=lambda extra: len(with_more(extra)))
    shares = {name: min(1.0, (limit + extra) / needed) for name, limit in limits.items()}
    widened = {name: share for name, share in shares.items() if share > getattr(caps, name)}
    # With these limits a round can be larger than needed.
    larger = within_shares(candidates, caps.model_copy(update=widened), most)
    return Choice(max(larger, with_more(extra), key=len), widened)


def within_shares(candidates: Sequence[WeighedSample], caps: Influence, most: int) -> list[int]:
    """The tasks that a round of at most `most` samples can take, the oldest first.

    No share of them is above its limit, except that one sample is always allowed. If the limits make the round
    smaller, shares are computed again for that size.
    """
    size = min(most, len(candidates))
    while True:
        taken = _pick(candidates, _limits(caps, size), size)
        if len(taken) >= size:
            return taken
        size = len(taken)


def _limits(caps: Influence, size: int) -> dict[str, int]:
    """Most samples of one conversation, user and template in a round of this size."""
    return {name: max(1, int(getattr(caps, name) * size + 1e-9)) for name in SHARES}


def _filling(candidates: Sequence[WeighedSample], name: str, size: int) -> int:
    """The smallest limit with which the candidates fill a round of this size, if it is the only limit."""
    counts = Counter(key for candidate in candidates if (key := getattr(candidate, name)))
    free = len(candidates) - counts.total()
    return bisect_left(range(size), size, key=lambda limit: free + sum(min(n, limit) for n in counts.values()))


def _pick(candidates: Iterable[WeighedSample], limits: Mapping[str, int], size: int) -> list[int]:
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
