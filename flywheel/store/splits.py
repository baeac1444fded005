"""The split of each conversation, training or held out: decided when its first task is stored, and never again.

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
from sqlalchemy import Connection, bindparam, delete, exists, func, insert, select, update

from flywheel.records.exclusion import Exclusion
from flywheel.records.similarity import NEAR, first_question, jaccard, normalised, prompt_signatures
from flywheel.records.states import ABSENT, Split, TaskState
from flywheel.records.task import Entry, split_of
from flywheel.store.gate_tests import conversation
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


class _Conversation(Struct, frozen=True):
    """A conversation that later ones may follow; `words` are those of its first question."""

    key: str
    split: Split
    words: frozenset[int]


class Splits:
    """The splits of the conversations of one batch of entries."""

    def __init__(self, conn: Connection, entries: Sequence[Entry], *, train_ratio: float, seed: int) -> None:
        self._conn = conn
        self._train_ratio = train_ratio
        self._seed = seed
        keys = [entry.split_key for entry in entries]
        self._splits = {row.key: Split(row.split) for row in _SPLITS.rows(conn, list(dict.fromkeys(keys)))}
        self._by_beginning: dict[int, _Conversation] = {}
        self._by_band: dict[int, list[_Conversation]] = {}
        by_key = list(zip(keys, entries, strict=True))
        wanted = {band for key, entry in by_key if key not in self._splits for band in entry.bands}
        beginnings = {entry.beginning for key, entry in by_key if self._shows_beginning(key, entry)}
        read: dict[str, _Conversation] = {}
        bands = sorted(wanted | beginnings)
        for row in (row for table in _BANDS for row in table.rows(conn, bands)):
            if row.key not in read:
                read[row.key] = _Conversation(row.key, Split(row.split), frozenset(array("I", row.words)))
            found = read[row.key]
            if row.band in wanted:
                self._by_band.setdefault(row.band, []).append(found)
            elif row.band not in self._by_beginning or found.split is Split.TRAIN:
                # Of a beginning that both splits have, the conversation in training is followed.
                self._by_beginning[row.band] = found
        self._followers: Counter[str] = Counter()
        self._repeated: set[int] = set()
        self._new: list[tuple[object, ...]] = []
        self._new_bands: list[tuple[int, str]] = []

    def of(self, entry: Entry, given: Split | None = None) -> Split:
        """The split of an entry. If its task has a `given` split already, a new conversation gets that one."""
        key = entry.split_key
        if key not in self._splits:
            self._splits[key] = self._decide(key, entry, given)
        elif self._shows_beginning(key, entry):
            self._note_beginning(key, entry, given or self._splits[key])
        return given or self._splits[key]

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

    def _decide(self, key: str, entry: Entry, given: Split | None) -> Split:
        same = self._by_beginning.get(entry.beginning)
        if same is not None and given in (None, same.split):
            self._new.append((key, same.split.value, same.key, b"", True))
            return same.split
        words = frozenset(entry.words)
        candidates = {each.key: each for band in entry.bands for each in self._by_band.get(band, ())}
        share, nearest = max(((jaccard(words, each.words), key) for key, each in candidates.items()), default=(0, ""))
        similar = candidates[nearest] if share >= NEAR else None
        follows = key
        if given is not None:
            split = given
        elif similar is not None and self._followers_of(similar.key) < TEMPLATE:
            split, follows = similar.split, similar.key
            self._followers[follows] += 1
        else:
            split = split_of(key, entry.trace_id, train_ratio=self._train_ratio, seed=self._seed)
        self._new.append((key, split.value, follows, array("I", entry.words).tobytes(), False))
        self._splits[key] = split
        self._note_beginning(key, entry, split, is_new=True)
        if similar is None:
            # Of near-duplicates only the first is looked up: the others are found through it.
            conversation = _Conversation(key, split, words)
            for band in dict.fromkeys(entry.bands):
                self._by_band.setdefault(band, []).append(conversation)
                self._new_bands.append((band, key))
        return split

    def _shows_beginning(self, key: str, entry: Entry) -> bool:
        """Whether an entry shows how its conversation begins: a linked one does not show the turns before it."""
        return bool(entry.beginning) and not (entry.linked and key in self._splits)

    def _note_beginning(self, key: str, entry: Entry, split: Split, *, is_new: bool = False) -> None:
        """Remember the first conversation with this beginning in a split, and whether both splits have one."""
        same = self._by_beginning.get(entry.beginning)
        if same is not None and same.split is split:
            return
        if same is not None:
            self._repeated.add(entry.beginning)
        if split is self._splits[key] and (split is Split.TRAIN if same else is_new or entry.words):
            self._by_beginning[entry.beginning] = _Conversation(key, split, frozenset())
            self._new_bands.append((entry.beginning, key))

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
