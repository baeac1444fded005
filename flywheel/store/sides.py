"""Which side of the split a conversation is on: decided once, when its first task comes, and never again.

A hash of the conversation decides, unless it begins nearly as an earlier one does: then it joins that one's side, so
that no held-out question is trained on in other words. Where very many begin alike, what they share is a template and
says nothing: those after the first `TEMPLATE` are decided by the hash again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from sqlalchemy import Connection, bindparam, func, select

from flywheel import likeness
from flywheel.batch import Entry
from flywheel.states import Split
from flywheel.store import openings
from flywheel.store.bulk import Lookup, insert_many, spelled
from flywheel.store.schema import conversations
from flywheel.task import conversation_key, split_of

TEMPLATE: Final = 50

_SIDES: Final = Lookup(select(conversations.c.key, conversations.c.split), conversations.c.key)
_FOLLOWERS: Final = spelled(
    select(func.count()).where(conversations.c.like == bindparam("key"), conversations.c.like != conversations.c.key)
)


class _Opening(Struct, frozen=True):
    key: str
    split: Split
    words: frozenset[int]


class Sides:
    """The sides of the conversations that the entries of one batch belong to."""

    def __init__(self, conn: Connection, entries: Sequence[Entry], *, train_ratio: float, seed: int) -> None:
        self._conn = conn
        self._train_ratio = train_ratio
        self._seed = seed
        self._followers: Counter[str] = Counter()
        keys = [conversation_key(entry.conversation_id, entry.trace_id) for entry in entries]
        stored = _SIDES.rows(conn, list(dict.fromkeys(keys)))
        self._sides = {row.key: Split(row.split) for row in stored}
        new = [entry for key, entry in zip(keys, entries, strict=True) if key not in self._sides]
        self._alike = self._known({band for entry in new for band in entry.bands})
        self._new: list[tuple[object, ...]] = []
        self._new_openings: list[tuple[object, ...]] = []

    def of(self, entry: Entry) -> Split:
        """The side of the conversation that an entry belongs to."""
        key = conversation_key(entry.conversation_id, entry.trace_id)
        if key not in self._sides:
            self._sides[key] = self._decide(key, entry)
        return self._sides[key]

    def keep(self, entry: Entry, side: Split) -> None:
        """The conversation of a task that is on a side already is there too, if it is a new one."""
        key = conversation_key(entry.conversation_id, entry.trace_id)
        if key not in self._sides:
            self._sides[key] = self._decide(key, entry, side)

    def store(self) -> None:
        """Write down what was decided."""
        insert_many(self._conn, conversations, ("key", "split", "like", "words"), self._new)
        openings.enter(self._conn, self._new_openings)

    def _decide(self, key: str, entry: Entry, side: Split | None = None) -> Split:
        split = split_of(entry.conversation_id, entry.trace_id, train_ratio=self._train_ratio, seed=self._seed)
        like = self._nearest(entry)
        followed = key
        if side is not None:
            split = side
        elif like is not None and self._followers_of(like.key) < TEMPLATE:
            split, followed = like.split, like.key
            self._followers[followed] += 1
        self._new.append((key, split.value, followed, array("I", entry.words).tobytes()))
        if like is None:
            # Only the first of those that are alike is looked for: the others would be found through it.
            opening = _Opening(key, split, frozenset(entry.words))
            for band in dict.fromkeys(entry.bands):
                self._alike.setdefault(band, []).append(opening)
                self._new_openings.append((band, key))
        return split

    def _nearest(self, entry: Entry) -> _Opening | None:
        candidates = {opening.key: opening for band in entry.bands for opening in self._alike.get(band, ())}
        if not candidates:
            return None
        words = frozenset(entry.words)
        share, key = max((likeness.likeness(words, opening.words), key) for key, opening in candidates.items())
        return candidates[key] if share >= likeness.NEAR else None

    def _followers_of(self, key: str) -> int:
        """How many conversations have joined this one; itself is counted too."""
        if key not in self._followers:
            self._followers[key] = 1 + int(self._conn.exec_driver_sql(_FOLLOWERS, (key,)).scalar_one())
        return self._followers[key]

    def _known(self, bands: set[int]) -> dict[int, list[_Opening]]:
        found: dict[int, list[_Opening]] = {}
        read: dict[str, _Opening] = {}
        for row in openings.with_bands(self._conn, sorted(bands)):
            if row.key not in read:
                read[row.key] = _Opening(row.key, Split(row.split), frozenset(array("I", row.words)))
            found.setdefault(row.band, []).append(read[row.key])
        return found
