"""Which side of the split a conversation is on: decided once, when its first task comes, and never again.

A hash of the conversation decides, unless it begins nearly as an earlier one does: then it joins that one's side, so
that no held-out question is trained on in other words. Where very many begin alike, what they share is a template and
says nothing: those after the first `TEMPLATE` are decided by the hash again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select

from flywheel import likeness
from flywheel.batch import Entry
from flywheel.states import Split
from flywheel.store.bulk import chunks, insert_many
from flywheel.store.schema import conversations, openings
from flywheel.task import conversation_key, split_of

TEMPLATE: Final = 50


@dataclass(frozen=True, slots=True)
class _Opening:
    key: str
    words: frozenset[int]


class Sides:
    """The sides of the conversations that the entries of one batch belong to."""

    def __init__(self, conn: Connection, entries: Sequence[Entry], *, train_ratio: float, seed: int) -> None:
        self._conn = conn
        self._train_ratio = train_ratio
        self._seed = seed
        keys = list(dict.fromkeys(conversation_key(entry.conversation_id, entry.trace_id) for entry in entries))
        self._sides: dict[str, Split] = {}
        self._follows: Counter[str] = Counter()
        for some in chunks(keys):
            rows = conn.execute(
                select(conversations.c.key, conversations.c.split).where(conversations.c.key.in_(some))
            )
            self._sides |= {row.key: Split(row.split) for row in rows}
        new = [
            entry
            for entry in entries
            if entry.bands and conversation_key(entry.conversation_id, entry.trace_id) not in self._sides
        ]
        self._alike = self._known({band for entry in new for band in entry.bands})
        self._new: list[tuple[object, ...]] = []
        self._new_openings: list[tuple[object, ...]] = []

    def of(self, entry: Entry) -> Split:
        """The side of the conversation that an entry belongs to."""
        key = conversation_key(entry.conversation_id, entry.trace_id)
        if key not in self._sides:
            self._sides[key] = self._decide(key, entry)
        return self._sides[key]

    def store(self) -> None:
        """Write down what was decided."""
        insert_many(self._conn, conversations, ("key", "split", "like", "words"), self._new)
        insert_many(self._conn, openings, ("band", "key"), self._new_openings)

    def _decide(self, key: str, entry: Entry) -> Split:
        split = split_of(entry.conversation_id, entry.trace_id, train_ratio=self._train_ratio, seed=self._seed)
        like = self._nearest(entry)
        follows = like is not None and self._followers(like) < TEMPLATE
        if like is not None and follows:
            split = self._side_of(like)
        followed = like if like is not None and follows else key
        self._follows[followed] += followed != key
        self._new.append((key, split.value, followed, array("I", entry.words).tobytes()))
        if like is None:
            # Only the first of those that are alike is looked for: the others would be found through it.
            words = frozenset(entry.words)
            for band in dict.fromkeys(entry.bands):
                self._alike.setdefault(band, []).append(_Opening(key, words))
                self._new_openings.append((band, key))
        return split

    def _nearest(self, entry: Entry) -> str | None:
        words = frozenset(entry.words)
        candidates = {opening.key: opening for band in entry.bands for opening in self._alike.get(band, ())}
        best = max(
            ((likeness.likeness(words, opening.words), key) for key, opening in candidates.items()), default=None
        )
        return best[1] if best is not None and best[0] >= likeness.NEAR else None

    def _side_of(self, key: str) -> Split:
        if key in self._sides:
            return self._sides[key]
        found = self._conn.execute(select(conversations.c.split).where(conversations.c.key == key)).scalar_one()
        return Split(found)

    def _followers(self, key: str) -> int:
        stored = self._conn.execute(
            select(func.count()).select_from(conversations).where(conversations.c.like == key)
        ).scalar_one()
        return int(stored) + self._follows[key]

    def _known(self, bands: set[int]) -> dict[int, list[_Opening]]:
        found: dict[int, list[_Opening]] = {}
        for some in chunks(sorted(bands)):
            rows = self._conn.execute(
                select(openings.c.band, openings.c.key, conversations.c.words)
                .select_from(openings.join(conversations))
                .where(openings.c.band.in_(some))
            )
            for row in rows:
                found.setdefault(row.band, []).append(_Opening(row.key, frozenset(array("I", row.words))))
        return found
