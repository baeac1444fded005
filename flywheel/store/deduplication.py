"""Deduplication: the stored fingerprints of questions, the embeddings, which task repeats which, and bursts of
near-identical questions, which are held for a person.

A duplicate repeats a task that is *kept*: one that passed deduplication and was not rejected since. When the judge
rejects a task, its duplicates are due again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, delete, exists, func, insert, select, update

from flywheel.records.similarity import Fingerprint, jaccard
from flywheel.records.states import ABSENT, ACCEPTED, TaskState
from flywheel.store.kernel.bulk import chunks, rows_in
from flywheel.store.kernel.schema import duplicates, embeddings, fingerprint_bands, fingerprints, tasks
from flywheel.store.kernel.transitions import move, utcnow


def nearest(conn: Connection, entry: ComparedTask, threshold: float, model: str, vector: bytes) -> Repeats | None:
    """The kept task whose question's embedding is most similar, if that is similar enough."""
    import numpy as np  # not before there is something to compare: a daemon that waits does without

    wanted = np.frombuffer(vector, dtype=np.float32)
    rows = conn.execute(
        select(tasks.c.id, tasks.c.key, fingerprints.c.particulars, embeddings.c.vector)
        .join(fingerprints, fingerprints.c.task_id == tasks.c.id)
        .join(embeddings, and_(embeddings.c.text == fingerprints.c.text, embeddings.c.model == model))
        .where(
            fingerprints.c.scope == entry.compared.scope,
            fingerprints.c.kept.is_(True),
            fingerprints.c.task_id != entry.task,
            tasks.c.state.not_in([state.value for state in GONE]),
        )
        .order_by(tasks.c.id)
    )
    best: Repeats | None = None
    for some in rows.partitions(4096):
        usable = [
            row
            for row in some
            if len(row.vector) == len(vector) and same_things(entry.compared, unpacked(row.particulars))
        ]
        if not usable:
            continue
        matrix = np.frombuffer(b"".join(row.vector for row in usable), dtype=np.float32).reshape(len(usable), -1)
        cosines = matrix @ wanted  # (task,)
        place = int(cosines.argmax())
        found = float(min(cosines[place], 1.0))
        # float32 vectors of the same text can miss 1 by a little.
        if found >= threshold - 1e-6 and (best is None or found > best.similarity):
            best = Repeats(usable[place].id, usable[place].key, round(found, 4), "embedding")
    return best


def lacking(conn: Connection, model: str, limit: int) -> list[Row[Any]]:
    """Kept tasks (text, payload) whose question has no embedding by this model yet."""
    made = exists().where(embeddings.c.model == model, embeddings.c.text == fingerprints.c.text)
    return list(
        conn.execute(
            select(fingerprints.c.text, tasks.c.payload)
            .join(tasks, tasks.c.id == fingerprints.c.task_id)
            .where(fingerprints.c.kept, tasks.c.state.not_in([state.value for state in GONE]), ~made)
            .order_by(tasks.c.id)
            .limit(limit)
        )
    )


def of_texts(conn: Connection, model: str, texts: Sequence[str]) -> dict[str, bytes]:
    """The embeddings of these texts as far as they were made."""
    query = select(embeddings.c.text, embeddings.c.vector).where(embeddings.c.model == model)
    return {row.text: bytes(row.vector) for row in rows_in(conn, query, embeddings.c.text, texts)}


def store(conn: Connection, model: str, made: Mapping[str, bytes]) -> int:
    """Store new embeddings. Stored ones of another length are deleted: another model had the same name.

    Returns how many were deleted.
    """
    there = of_texts(conn, model, list(made))
    rows: list[dict[str, Any]] = [
        {"model": model, "text": text, "vector": made[text]} for text in made if text not in there
    ]
    length = max((len(row["vector"]) for row in rows), default=0)
    forgotten = _delete_others(conn, model, length) if length else 0
    if rows:
        conn.execute(insert(embeddings), rows)
    return forgotten


def _delete_others(conn: Connection, model: str, length: int) -> int:
    size = func.length(embeddings.c.vector)
    made = and_(embeddings.c.model == model, size > 0)
    # One tells of all: there are never two lengths.
    known = conn.execute(select(size).where(made).limit(1)).scalar_one_or_none()
    if known in (None, length):
        return 0
    return conn.execute(delete(embeddings).where(made, size != length)).rowcount


GONE: Final = (TaskState.REJECTED, TaskState.DEAD, *ABSENT)
"""A task in one of these states is not kept: other tasks may repeat it."""

NOT_YET_USED: Final = (TaskState.PENDING, TaskState.JUDGING, TaskState.UNDECIDED, TaskState.ACCEPTED)
"""States in which a task of a burst can still be held."""
LIKELY: Final = 256
"""Earlier questions that one is compared with word by word, at most."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which kept task a question repeats, how nearly (0…1), and by which method that was found."""

    task: int
    key: str
    similarity: float
    method: str


@dataclass(frozen=True, slots=True)
class Near:
    """A stored question that is near another one; `kept` is whether the other one may not repeat it.

    `text` names its embedding.
    """

    task: int
    key: str
    text: str
    like: int
    similarity: float
    is_exact: bool
    kept: bool


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """A task with what its question is compared by."""

    task: int
    key: str
    compared: Fingerprint


def enter(conn: Connection, entries: Sequence[ComparedTask], threshold: float) -> dict[int, list[Near]]:
    """Store the fingerprints of these tasks, and find what is near each of them, the nearest first.

    A task is like the first that it nearly repeats. Tasks of the same call are found too, in their order.
    """
    ids = [entry.task for entry in entries]
    known = {row.task_id: row for row in rows_in(conn, select(fingerprints), fingerprints.c.task_id, ids)}
    near: dict[int, list[Near]] = {}
    rows: list[dict[str, Any]] = []
    leaders: list[ComparedTask] = []
    stale: list[int] = []
    for entry in entries:
        own, before = entry.compared, known.get(entry.task)
        found = _near(conn, entry, threshold)
        for other, like in ((each, row["like"]) for each, row in zip(entries, rows, strict=False)):
            share = _share(own, other.compared.scope, other.compared.words, other.compared.particulars)
            if other.task != entry.task and share >= threshold:
                is_exact = own.exact == other.compared.exact
                near_one = Near(other.task, other.key, other.compared.text, like, round(share, 4), is_exact, False)
                found.append(near_one)
        near[entry.task] = sorted(found, key=lambda each: (not each.is_exact, -each.similarity, each.task))
        same = before is not None and before.exact == own.exact and before.threshold == threshold
        like = before.like if same and before else near[entry.task][0].like if found else entry.task
        rows.append(
            {
                "task_id": entry.task,
                "like": like,
                "scope": own.scope,
                "exact": own.exact,
                "words": _packed(own.words),
                "particulars": _packed(own.particulars),
                "text": own.text,
                "threshold": threshold,
                "kept": bool(before and before.kept),
                **{name: getattr(own, name) for name in ("conversation", "user", "template", "origin", "at")},
            }
        )
        if before is not None:
            stale.append(entry.task)
        if like == entry.task or (before is not None and before.kept):
            leaders.append(entry)
    for some in chunks(stale):
        conn.execute(delete(fingerprint_bands).where(fingerprint_bands.c.task_id.in_(some)))
        conn.execute(delete(fingerprints).where(fingerprints.c.task_id.in_(some)))
    if rows:
        conn.execute(insert(fingerprints), rows)
    _enter_bands(conn, leaders)
    return near


def keep(conn: Connection, entries: Sequence[ComparedTask]) -> None:
    """Mark tasks as kept: they go on to the judge, and later ones are compared with them."""
    ids = [entry.task for entry in entries]
    for some in chunks(ids):
        conn.execute(update(fingerprints).where(fingerprints.c.task_id.in_(some)).values(kept=True))
    with_bands = select(fingerprint_bands.c.task_id).distinct()
    there = {row.task_id for row in rows_in(conn, with_bands, fingerprint_bands.c.task_id, ids)}
    _enter_bands(conn, [entry for entry in entries if entry.task not in there])


def accepted_before(
    conn: Connection, near: Mapping[int, Sequence[Near]], hashes: Mapping[int, str]
) -> dict[int, Repeats]:
    """The tasks whose question and answer, by their `qa_hash`, an accepted task has after the same history."""
    exact = {other.task for others in near.values() for other in others if other.is_exact}
    query = select(tasks.c.id, tasks.c.payload).where(tasks.c.state.in_([state.value for state in ACCEPTED]))
    known = {row.id: row.payload["metadata"]["qa_hash"] for row in rows_in(conn, query, tasks.c.id, list(exact))}
    return {
        task: Repeats(other.task, other.key, 1.0, "exact")
        for task, others in near.items()
        for other in others[::-1]
        if other.is_exact and known.get(other.task) == hashes[task]
    }


def _near(conn: Connection, entry: ComparedTask, threshold: float) -> list[Near]:
    own = entry.compared
    # Questions of one pattern share bands by chance, however many there are; near ones share most.
    likely = (
        select(fingerprint_bands.c.task_id)
        .where(fingerprint_bands.c.band.in_(own.bands))
        .group_by(fingerprint_bands.c.task_id)
        .order_by(func.count().desc(), fingerprint_bands.c.task_id)
        .limit(LIKELY)
    )
    rows = conn.execute(
        select(fingerprints, tasks.c.key, tasks.c.state)
        .join(tasks, tasks.c.id == fingerprints.c.task_id)
        .where(fingerprints.c.task_id.in_(likely), fingerprints.c.task_id != entry.task)
    )
    found = []
    for row in rows:
        share = _share(own, row.scope, unpacked(row.words), unpacked(row.particulars))
        if share >= threshold:
            kept = row.kept and TaskState(row.state) not in GONE
            is_exact = row.exact == own.exact
            found.append(Near(row.task_id, row.key, row.text, row.like, round(share, 4), is_exact, kept))
    return found


def _share(own: Fingerprint, scope: int, words: frozenset[int], particulars: frozenset[int]) -> float:
    comparable = scope == own.scope and same_things(own, particulars)
    return jaccard(own.words, words) if comparable else 0.0


def same_things(own: Fingerprint, particulars: frozenset[int]) -> bool:
    """Whether two questions name the same things; one that names none can be about any (all in lower case)."""
    return not own.particulars or not particulars or own.particulars == particulars


def _packed(words: frozenset[int]) -> bytes:
    return array("I", sorted(words)).tobytes()


def unpacked(words: bytes) -> frozenset[int]:
    """The words of a fingerprint, or its particulars."""
    return frozenset(array("I", words))


def _enter_bands(conn: Connection, entries: Sequence[ComparedTask]) -> None:
    rows = [
        {"band": band, "task_id": entry.task} for entry in entries for band in dict.fromkeys(entry.compared.bands)
    ]
    if rows:
        conn.execute(insert(fingerprint_bands), rows)


def hold_bursts(conn: Connection, asked: Sequence[int], count: int, seconds: float) -> list[int]:
    """Hold the tasks of bursts: `count` or more near-identical questions of one origin within `seconds`.

    Only bursts with one of the tasks `asked` are looked for. Their other tasks are held as well, unless a round has
    them. Returns the tasks that are held now. Tasks that a person released are neither counted nor held again.
    """
    columns = fingerprints.c.task_id, fingerprints.c.like, fingerprints.c.origin, fingerprints.c.at
    free = select(*columns, tasks.c.state).join(tasks).where(~tasks.c.released).subquery()
    ids = select(func.json_each(json.dumps([*asked])).table_valued("value").c.value)
    groups = (
        select(free.c.like, free.c.origin, func.min(free.c.at).label("first"), func.max(free.c.at).label("last"))
        .where(free.c.task_id.in_(ids))
        .group_by(free.c.like, free.c.origin)
        .subquery()
    )
    # All that can be in a window with one of these.
    near = free.c.at.between(groups.c.first - seconds, groups.c.last + seconds)
    alike = and_(free.c.like == groups.c.like, free.c.origin == groups.c.origin, near)
    in_order = free.c.like, free.c.origin, free.c.at, free.c.task_id
    rows = conn.execute(select(free).join(groups, alike).order_by(*in_order)).all()
    held: list[int] = []
    for _, some in groupby(rows, key=lambda row: (row.like, row.origin)):
        times = list(some)
        burst = _bursts(times, {*asked}, count, seconds)
        why = f"one of {len(burst)} near-identical questions within {seconds:g} s"
        for row in times:
            state = TaskState(row.state)
            is_free = row.task_id in burst and state in NOT_YET_USED
            if is_free and move(conn, row.task_id, state, TaskState.HELD, why, retry_at=None):
                held.append(row.task_id)
    return held


def _bursts(times: Sequence[Row[Any]], asked: Set[int], count: int, seconds: float) -> set[int]:
    """The tasks of all windows of `seconds` with `count` or more tasks, one of them in `asked`."""
    burst: set[int] = set()
    start = 0
    newest = -1  # the last position of a task in `asked`
    done = 0  # all positions before are done
    for end, row in enumerate(times):
        if row.task_id in asked:
            newest = end
        while row.at - times[start].at > seconds:
            start += 1
        if end - start + 1 >= count and newest >= start:
            burst |= {each.task_id for each in times[max(start, done) : end + 1]}
            done = end + 1
    return burst


def note(conn: Connection, task: int, found: Repeats) -> None:
    """Store which task a rejected one repeats."""
    conn.execute(delete(duplicates).where(duplicates.c.task_id == task))
    conn.execute(
        insert(duplicates).values(
            task_id=task,
            original_id=found.task,
            similarity=found.similarity,
            method=found.method,
            created_at=utcnow(),
        )
    )


def forget(conn: Connection, task: int) -> None:
    """Delete the fingerprint of a task whose reply has changed. Its duplicates are due again."""
    for table in (fingerprint_bands, fingerprints, duplicates):
        conn.execute(delete(table).where(table.c.task_id == task))
    free_repetitions(conn, [task])


def free_repetitions(conn: Connection, originals: Sequence[int]) -> int:
    """Make the rejected duplicates of these tasks due again, which are rejected themselves; how many."""
    rejected = (
        select(duplicates.c.task_id)
        .join(tasks, tasks.c.id == duplicates.c.task_id)
        .where(tasks.c.state == TaskState.REJECTED.value)
        .order_by(duplicates.c.task_id)
    )
    freed = 0
    for row in list(rows_in(conn, rejected, duplicates.c.original_id, originals)):
        conn.execute(delete(duplicates).where(duplicates.c.task_id == row.task_id))
        freed += move(conn, row.task_id, TaskState.REJECTED, TaskState.PENDING, "what it repeated was rejected")
    return freed


def gone(conn: Connection, ids: Sequence[int]) -> list[int]:
    """Those of these tasks that are not kept any more."""
    where = tasks.c.state.in_([state.value for state in GONE])
    return [row.id for row in rows_in(conn, select(tasks.c.id).where(where), tasks.c.id, ids)]


def unknown(conn: Connection, threshold: float, limit: int) -> list[Row[Any]]:
    """Accepted tasks (id, key, payload, target) that were not compared yet, or with another threshold."""
    compared = exists().where(fingerprints.c.task_id == tasks.c.id, fingerprints.c.threshold == threshold)
    return list(
        conn.execute(
            select(tasks.c.id, tasks.c.key, tasks.c.payload, tasks.c.target)
            .where(tasks.c.state.in_([state.value for state in ACCEPTED]), ~compared)
            .order_by(tasks.c.id)
            .limit(limit)
        )
    )


def take_in(conn: Connection, entries: Sequence[ComparedTask], threshold: float) -> None:
    """Enter tasks that were accepted before, and keep them."""
    enter(conn, entries, threshold)
    keep(conn, entries)
