"""Which side of the split a conversation is on: decided once, when its first task comes, and never again.

A hash of the conversation decides, unless it begins as an earlier one does: then it follows that one, so that no
held-out question is trained on. This holds for all that begin exactly alike (system prompt, tools and first
question), however many. Where very many begin only nearly alike, what they share is a template and says nothing:
those after the first `TEMPLATE` are decided by the hash again.

Dialogues that share a conversation id are on one side whatever they ask, and states of earlier versions hold exact
repetitions on both sides. Of those the held-out ones leave the gate.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct
from sqlalchemy import Connection, Row, Table, bindparam, delete, exists, func, insert, select

from flywheel import similarity
from flywheel.batch import Entry
from flywheel.states import Split, TaskState
from flywheel.store import samples, signature_filter
from flywheel.store.bulk import Lookup, insert_many, sql_text
from flywheel.store.schema import conversations, openings, recent_openings, tasks
from flywheel.task import conversation_key, split_of
from flywheel.terminal import quantity

TEMPLATE: Final = 50

_SIDES: Final = Lookup(select(conversations.c.key, conversations.c.split), conversations.c.key)
_FOLLOWERS: Final = sql_text(
    select(func.count()).where(
        conversations.c.like == bindparam("key"), conversations.c.like != conversations.c.key, ~conversations.c.exact
    )
)


def empty_side(conn: Connection, train_ratio: float) -> str:
    """Which side of the split has no task, and why; empty when both have some, or there are none yet."""
    standing = [state.value for state in TaskState if state is not TaskState.WITHDRAWN]
    here = {
        side: bool(
            conn.execute(select(exists().where(tasks.c.state.in_(standing), tasks.c.split == side))).scalar_one()
        )
        for side in Split
    }
    if all(here.values()) or not any(here.values()):
        return ""
    empty = next(side for side in Split if not here[side])
    total, ways = conn.execute(
        select(func.count(), func.count().filter(conversations.c.like == conversations.c.key)).select_from(
            conversations
        )
    ).one()
    share = train_ratio if empty is Split.TRAIN else 1 - train_ratio
    told = f"no task is {'held out' if empty is Split.HELD_OUT else 'for training'}:"
    if total > 1 and ways == 1:
        return f"{told} all {total:,} conversations begin alike, and those that do are on one side"
    there = f"{quantity(total, 'conversation begins', 'conversations begin')} in {quantity(ways, 'way')}"
    return (
        f"{told} by ingest.train_ratio {train_ratio:g} about {share:.0%} of conversations are, and those that begin"
        f" alike are on one side; {there}"
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
        self._begun: dict[int, _Opening] = {}
        self._alike: dict[int, list[_Opening]] = {}
        self._look_up(
            {band for entry in new for band in entry.bands},
            {entry.beginning for key, entry in zip(keys, entries, strict=True) if self._shows(key, entry)},
        )
        self._repeated: set[int] = set()
        self._new: list[tuple[object, ...]] = []
        self._new_openings: list[tuple[object, ...]] = []

    def of(self, entry: Entry) -> Split:
        """The side of the conversation that an entry belongs to."""
        key = conversation_key(entry.conversation_id, entry.trace_id)
        if key not in self._sides:
            self._sides[key] = self._decide(key, entry)
        elif self._shows(key, entry):
            self._compare(key, entry, self._sides[key])
        return self._sides[key]

    def keep(self, entry: Entry, side: Split) -> None:
        """The conversation of a task that is on a side already is there too, if it is a new one."""
        key = conversation_key(entry.conversation_id, entry.trace_id)
        if key not in self._sides:
            self._sides[key] = self._decide(key, entry, side)
        elif self._shows(key, entry):
            self._compare(key, entry, side)

    def store(self) -> None:
        """Write down what was decided, when the tasks are stored."""
        insert_many(self._conn, conversations, ("key", "split", "like", "words", "exact"), self._new)
        enter(self._conn, self._new_openings)
        samples.leave_gate(self._conn, self._repeated)

    def _decide(self, key: str, entry: Entry, side: Split | None = None) -> Split:
        split = split_of(entry.conversation_id, entry.trace_id, train_ratio=self._train_ratio, seed=self._seed)
        first = self._begun.get(entry.beginning)
        if first is not None and side in (None, first.split):
            self._new.append((key, first.split.value, first.key, b"", True))
            return first.split
        like = self._nearest(entry)
        followed = key
        if side is not None:
            split = side
        elif like is not None and self._followers_of(like.key) < TEMPLATE:
            split, followed = like.split, like.key
            self._followers[followed] += 1
        self._new.append((key, split.value, followed, array("I", entry.words).tobytes(), False))
        self._sides[key] = split
        self._compare(key, entry, split, is_new=True)
        if like is None:
            # Only the first of those that are alike is looked for: the others would be found through it.
            opening = _Opening(key, split, frozenset(entry.words))
            for band in dict.fromkeys(entry.bands):
                self._alike.setdefault(band, []).append(opening)
                self._new_openings.append((band, key))
        return split

    def _shows(self, key: str, entry: Entry) -> bool:
        """Whether an entry says what its dialogue begins with: a linked one does not show the turns before it."""
        return bool(entry.beginning) and not (entry.linked and key in self._sides)

    def _compare(self, key: str, entry: Entry, side: Split, *, is_new: bool = False) -> None:
        """Whether a task on this side begins as one on the other side does. The first of each kind is followed."""
        first = self._begun.get(entry.beginning)
        if first is not None and first.split is side:
            return
        if first is not None:
            self._repeated.add(entry.beginning)
        if side is self._sides[key] and (side is Split.TRAIN if first else is_new or entry.words):
            self._begun[entry.beginning] = _Opening(key, side, frozenset())
            self._new_openings.append((entry.beginning, key))

    def _nearest(self, entry: Entry) -> _Opening | None:
        candidates = {opening.key: opening for band in entry.bands for opening in self._alike.get(band, ())}
        if not candidates:
            return None
        words = frozenset(entry.words)
        share, key = max((similarity.jaccard(words, opening.words), key) for key, opening in candidates.items())
        return candidates[key] if share >= similarity.NEAR else None

    def _followers_of(self, key: str) -> int:
        """How many conversations have joined this one; itself is counted too."""
        if key not in self._followers:
            self._followers[key] = 1 + int(self._conn.exec_driver_sql(_FOLLOWERS, (key,)).scalar_one())
        return self._followers[key]

    def _look_up(self, bands: set[int], beginnings: set[int]) -> None:
        read: dict[str, _Opening] = {}
        for row in with_bands(self._conn, sorted(bands | beginnings)):
            if row.key not in read:
                read[row.key] = _Opening(row.key, Split(row.split), frozenset(array("I", row.words)))
            found = read[row.key]
            if row.band in bands:
                self._alike.setdefault(row.band, []).append(found)
            elif row.band not in self._begun or found.split is Split.TRAIN:
                # Of what stands on both sides, that in training is followed.
                self._begun[row.band] = found


RECENT: Final = 50_000
"""Rows of the small table, at most: two megabytes."""


def _found_in(table: Table) -> Lookup:
    query = select(table.c.band, table.c.key, conversations.c.split, conversations.c.words)
    return Lookup(query.select_from(table.join(conversations)), table.c.band)


_FOUND_RECENTLY: Final = _found_in(recent_openings)
_FOUND: Final = _found_in(openings)
_COUNT: Final = sql_text(select(func.count()).select_from(recent_openings))
_BANDS: Final = sql_text(select(recent_openings.c.band))


def with_bands(conn: Connection, bands: Sequence[int]) -> Iterator[Row[Any]]:
    """Conversations (band, key, split, words) that have one of these bands; once for each that they have."""
    yield from _FOUND_RECENTLY.rows(conn, bands)
    yield from _FOUND.rows(conn, signature_filter.may_have(conn, bands))


def enter(conn: Connection, rows: Sequence[tuple[object, ...]]) -> None:
    """Have conversations be found: a row of band and key for each band."""
    if not rows:
        return
    insert_many(conn, recent_openings, ("band", "key"), rows)
    count = int(conn.exec_driver_sql(_COUNT).scalar_one())
    if count > RECENT:
        in_order = select(recent_openings.c.band, recent_openings.c.key).order_by(recent_openings.c.band)
        conn.execute(insert(openings).from_select(("band", "key"), in_order))
        signature_filter.add(conn, signature_filter.bands_in(conn, _BANDS), count)
        conn.execute(delete(recent_openings))
