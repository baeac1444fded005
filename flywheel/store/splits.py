"""The split of each conversation, training or held out: decided when its first task is stored, and never again.

`Splits` decides for the new tasks of one transaction, in their order, before they are written: no task is ever stored
without its split.

A hash of the conversation decides, unless it begins as an earlier one does: then it follows that one, so that no
held-out question is trained on. All that begin exactly alike (system prompt, tools and first question) follow the
first, however many. Conversations that begin nearly alike follow the first as well, up to `TEMPLATE` of them: beyond,
what they share is a template, and the hash decides.

Conversations with the same id are in one split whatever they ask, and those that fork from another are in its split:
where exact repetitions are in both splits therefore, the held-out ones leave the gate.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import orjson
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Connection,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from flywheel.records.exclusion import Exclusion
from flywheel.records.similarity import (
    NEAR,
    first_question,
    jaccard,
    normalised,
    opening_bands,
    prompt_signatures,
)
from flywheel.records.states import ABSENT, Split, TaskState
from flywheel.records.task import NO_CONVERSATION, Entry, split_of
from flywheel.store.kernel.bulk import Lookup, chunks, insert_many, rows_in, sql_text
from flywheel.store.kernel.schema import conversations, recent_bands, signature_bands, tasks
from flywheel.system.terminal import quantity

TEMPLATE: Final = 50
RECENT: Final = 50_000
"""Rows of the table of recent bands, at most: two megabytes."""

_SPLITS: Final = Lookup(select(conversations.c.key, conversations.c.split), conversations.c.key)
_BANDS: Final = [
    Lookup(
        select(table, conversations.c.split, conversations.c.words).select_from(table.join(conversations)),
        table.c.band,
    )
    for table in (recent_bands, signature_bands)
]
_COUNT_RECENT: Final = sql_text(select(func.count()).select_from(recent_bands))
_FOLLOWERS: Final = sql_text(
    select(func.count()).where(
        conversations.c.like == bindparam("key"), conversations.c.like != conversations.c.key, ~conversations.c.exact
    )
)


def conversation() -> ColumnElement[str]:
    """The key of a task's conversation, see `flywheel.records.task.conversation_key`."""
    trace = func.json_extract(tasks.c.payload, "$.metadata.trace_id")
    return case((tasks.c.conversation_id.in_(sorted(NO_CONVERSATION)), trace), else_=tasks.c.conversation_id)


class _Conversation(Struct, frozen=True):
    """A conversation that later ones may follow; `words` are those of its first question."""

    key: str
    split: Split
    words: frozenset[int]


class Splits:
    """The splits of the conversations of some entries, all of one transaction."""

    def __init__(self, conn: Connection, entries: Sequence[Entry], *, train_ratio: float, seed: int) -> None:
        self._conn = conn
        self._train_ratio = train_ratio
        self._seed = seed
        known = _SPLITS.rows(conn, list(dict.fromkeys(entry.split_key for entry in entries)))
        self._splits = {row.key: Split(row.split) for row in known}
        deciding = {entry.split_key: entry for entry in reversed(entries) if entry.split_key not in self._splits}
        openings = [(array("I", entry.words), entry.numbers) for entry in deciding.values()]
        self._bands = dict(zip(deciding, opening_bands(openings), strict=True))
        bands = {entry.beginning for entry in entries}.union(*self._bands.values())
        self._found: defaultdict[int, list[_Conversation]] = defaultdict(list)
        """Conversations by band and beginning; of a beginning one in each split at most."""
        read: dict[str, _Conversation] = {}
        in_order = sorted(bands)
        for row in (row for table in _BANDS for row in table.rows(conn, in_order)):
            if row.key not in read:
                read[row.key] = _Conversation(row.key, Split(row.split), frozenset(array("I", row.words)))
            self._found[row.band].append(read[row.key])
        self._followers: Counter[str] = Counter()
        self._repeated: set[int] = set()
        self._new: list[tuple[object, ...]] = []
        self._new_bands: list[tuple[int, str]] = []

    def of(self, entry: Entry, kept: Split | None = None) -> Split:
        """The split of an entry, or the one that its task has already and has `kept`. An entry that does not show how
        its conversation begins has no `beginning` and no `words`."""
        key = entry.split_key
        is_new = key not in self._splits
        if is_new:
            self._splits[key] = self._decide(entry, kept)
        split = kept or self._splits[key]
        same = self._beginning(entry)
        if same is not None and same.split is not split:
            self._repeated.add(entry.beginning)
        if same is None:
            is_noted = bool(entry.beginning and (is_new or entry.words))
        else:
            is_noted = split is Split.TRAIN and same.split is Split.HELD_OUT
        if is_noted and split is self._splits[key]:
            self._enter(_Conversation(key, split, frozenset()), entry.beginning)
        return split

    def store(self) -> None:
        """Write the decisions to the database.

        New bands go to the small table, whose rows move to the large one when there are many: bands are hashes, and
        each changes another page of the large table, unless many are inserted in their order.
        """
        conn = self._conn
        insert_many(conn, conversations, ("key", "split", "like", "words", "exact"), self._new)
        insert_many(conn, recent_bands, ("band", "key"), self._new_bands)
        if self._new_bands and conn.exec_driver_sql(_COUNT_RECENT).scalar_one() > RECENT:
            in_order = select(recent_bands.c.band, recent_bands.c.key).order_by(recent_bands.c.band)
            conn.execute(insert(signature_bands).from_select(("band", "key"), in_order))
            conn.execute(delete(recent_bands))
        if self._repeated:
            _leave_gate(conn, self._repeated)

    def _decide(self, entry: Entry, kept: Split | None) -> Split:
        key, same = entry.split_key, self._beginning(entry)
        if same is not None and kept in (None, same.split):
            self._new.append((key, same.split.value, same.key, b"", True))
            return same.split
        words, follows = frozenset(array("I", entry.words)), key
        split = kept or split_of(key, entry.trace_id, train_ratio=self._train_ratio, seed=self._seed)
        bands = self._bands[key] if words else ()
        candidates = {each.key: each for band in bands for each in self._found.get(band, ())}
        share, nearest = max(((jaccard(words, each.words), key) for key, each in candidates.items()), default=(0, ""))
        similar = candidates[nearest] if share >= NEAR else None
        if similar is not None and kept is None and self._followers_of(nearest) < TEMPLATE:
            split, follows = similar.split, nearest
            self._followers[follows] += 1
        self._new.append((key, split.value, follows, entry.words, False))
        if similar is None:
            # Of near-duplicates only the first is looked up: the others are found through it.
            self._enter(_Conversation(key, split, words), *dict.fromkeys(bands))
        return split

    def _beginning(self, entry: Entry) -> _Conversation | None:
        """The conversation that begins exactly as that of an entry does; of two, the one in training is followed."""
        found = self._found.get(entry.beginning, ())
        return min(found, key=lambda each: each.split is not Split.TRAIN, default=None)

    def _enter(self, conversation: _Conversation, *bands: int) -> None:
        for band in bands:
            self._found[band].append(conversation)
            self._new_bands.append((band, conversation.key))

    def _followers_of(self, key: str) -> int:
        """How many conversations follow this one nearly, and itself."""
        if key not in self._followers:
            self._followers[key] = 1 + int(self._conn.exec_driver_sql(_FOLLOWERS, (key,)).scalar_one())
        return self._followers[key]


def _leave_gate(conn: Connection, beginnings: Collection[int]) -> None:
    """Exclude held-out tasks with these beginnings from the gate: conversations in training begin so too."""
    for some in chunks(sorted(beginnings)):
        conn.execute(
            update(tasks)
            .where(tasks.c.beginning.in_(some), ~tasks.c.excluded.endswith(Exclusion.REPEATED.value))
            .values(excluded=func.ltrim(tasks.c.excluded + f" {Exclusion.REPEATED.value}"))
        )


def held_out_alike(conn: Connection, beginnings: Collection[int], questions: Collection[str]) -> list[str]:
    """The keys of the held-out tasks, the oldest first, whose conversations begin exactly as some data does
    (`beginnings`), with one of its first `questions`, or nearly as one, by the rule of the split."""
    by_band = defaultdict[int, list[frozenset[int]]](list)
    signatures = prompt_signatures(list(questions))
    for words, band in ((each.words, band) for each in signatures for band in each.bands):
        by_band[band].append(frozenset(words))
    held_out = Split.HELD_OUT.value
    near = {
        row.key
        for row in (row for table in _BANDS for row in table.rows(conn, sorted(by_band)))
        if row.split == held_out
        and any(jaccard(frozenset(array("I", row.words)), each) >= NEAR for each in by_band[row.band])
    }
    # Conversations of a template have no bands: of them, only the same question is found.
    packed, texts = {array("I", each.words).tobytes() for each in signatures}, set(map(normalised, questions))
    all_words = select(conversations.c.key, conversations.c.words).where(conversations.c.split == held_out)
    same = [key for key, words in conn.execute(all_words) if words and words in packed]
    prompt = func.json_extract(tasks.c.payload, "$.prompt").label("prompt")
    of_tasks = select(tasks.c.id, tasks.c.key, prompt).where(tasks.c.split == held_out, tasks.c.state.not_in(ABSENT))
    joined = of_tasks.join(conversations, conversations.c.key == conversation())
    found = [
        *rows_in(conn, of_tasks, tasks.c.beginning, sorted(beginnings)),
        *rows_in(conn, joined, conversations.c.key, sorted(near)),
        *rows_in(conn, joined, conversations.c.like, sorted(near)),
        *(
            row
            for row in rows_in(conn, joined, conversations.c.key, same)
            if normalised(first_question(orjson.loads(row.prompt))) in texts
        ),
    ]
    return list({row.id: row.key for row in sorted(found, key=lambda row: row.id)}.values())


def empty_split(conn: Connection, train_ratio: float) -> str:
    """Which split has no task, and why; empty if both have some, or there are none yet."""
    states = [state.value for state in TaskState if state not in ABSENT]
    has_tasks = {
        split: bool(
            conn.execute(select(exists().where(tasks.c.state.in_(states), tasks.c.split == split))).scalar_one()
        )
        for split in Split
    }
    if all(has_tasks.values()) or not any(has_tasks.values()):
        return ""
    empty = next(split for split in Split if not has_tasks[split])
    leads = func.count().filter(conversations.c.like == conversations.c.key)
    total, beginnings = conn.execute(select(func.count(), leads).select_from(conversations)).one()
    problem = f"no task is {'held out' if empty is Split.HELD_OUT else 'for training'}:"
    if total > 1 and beginnings == 1:
        return f"{problem} all {total:,} conversations begin alike, and such conversations are in one split"
    share = train_ratio if empty is Split.TRAIN else 1 - train_ratio
    found = f"{quantity(total, 'conversation begins', 'conversations begin')} in {quantity(beginnings, 'way')}"
    return (
        f"{problem} by ingest.train_ratio {train_ratio:g} about {share:.0%} of conversations are, and those that"
        f" begin alike are in one split; {found}"
    )
