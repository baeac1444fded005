"""Duplicates: what earlier tasks are compared by, their embeddings, and which task repeats which.

A duplicate repeats a task that is *kept*: one that passed deduplication and that nobody has rejected since. When the
judge rejects a task, those that were put aside as its repetitions are due again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Row, and_, delete, exists, insert, select, update

from flywheel import likeness
from flywheel.states import TaskState
from flywheel.store.marks import CHUNK, chunks
from flywheel.store.schema import duplicates, embeddings, fingerprint_bands, fingerprints, tasks
from flywheel.store.transitions import move, utcnow

GONE: Final = (TaskState.REJECTED, TaskState.DEAD, TaskState.WITHDRAWN)
"""A task in one of these stands in nobody's way."""
DECIDED: Final = (TaskState.ACCEPTED, TaskState.RESERVED, TaskState.CONSUMED)


class Compared(Protocol):
    """What this module stores of a question, see `flywheel.filtering.deduplication.Fingerprint`."""

    @property
    def scope(self) -> int: ...
    @property
    def exact(self) -> int: ...
    @property
    def words(self) -> frozenset[int]: ...
    @property
    def bands(self) -> tuple[int, ...]: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which kept task a question repeats, how nearly (0…1), and by which method that was found."""

    task: int
    key: str
    similarity: float
    method: str


def enter(conn: Connection, task: int, print_: Compared, threshold: float) -> None:
    """Remember what a task is compared by; once. It is like the first that it nearly repeats."""
    known = conn.execute(
        select(fingerprints.c.exact, fingerprints.c.threshold, fingerprints.c.kept).where(
            fingerprints.c.task_id == task
        )
    ).one_or_none()
    if known is not None and known.exact == print_.exact and known.threshold == threshold:
        return
    if known is not None:
        conn.execute(delete(fingerprint_bands).where(fingerprint_bands.c.task_id == task))
        conn.execute(delete(fingerprints).where(fingerprints.c.task_id == task))
    near = _near(conn, task, print_, threshold, kept=False)
    like = near[0][1].like if near else task
    conn.execute(
        insert(fingerprints).values(
            task_id=task,
            like=like,
            scope=print_.scope,
            exact=print_.exact,
            words=array("I", sorted(print_.words)).tobytes(),
            text=print_.text,
            threshold=threshold,
            kept=bool(known and known.kept),
        )
    )
    if like == task or (known and known.kept):
        _enter_bands(conn, task, print_)


def keep(conn: Connection, task: int, print_: Compared) -> None:
    """The task goes on to the judge: later ones are compared with it."""
    changed = conn.execute(
        update(fingerprints).where(fingerprints.c.task_id == task, fingerprints.c.kept.is_(False)).values(kept=True)
    )
    if changed.rowcount:
        _enter_bands(conn, task, print_)


def repeated(
    conn: Connection, task: int, print_: Compared, threshold: float, model: str | None, vector: bytes
) -> Repeats | None:
    """The kept task that this one repeats most nearly; by embeddings if `vector` is one, else by words."""
    exact = conn.execute(
        select(tasks.c.id, tasks.c.key)
        .join(fingerprints, fingerprints.c.task_id == tasks.c.id)
        .where(fingerprints.c.exact == print_.exact, *_is_kept(task))
        .order_by(tasks.c.id)
        .limit(1)
    ).one_or_none()
    if exact is not None:
        return Repeats(exact.id, exact.key, 1.0, "exact")
    if model is not None and vector:
        return _by_embedding(conn, task, print_, threshold, model, vector)
    near = _near(conn, task, print_, threshold, kept=True)
    return Repeats(near[0][1].task_id, near[0][1].key, near[0][0], "words") if near else None


def _by_embedding(
    conn: Connection, task: int, print_: Compared, threshold: float, model: str, vector: bytes
) -> Repeats | None:
    import numpy as np  # not before there is something to compare: a daemon that waits does without

    wanted = np.frombuffer(vector, dtype=np.float32)
    rows = conn.execute(
        select(tasks.c.id, tasks.c.key, embeddings.c.vector)
        .join(fingerprints, fingerprints.c.task_id == tasks.c.id)
        .join(embeddings, and_(embeddings.c.text == fingerprints.c.text, embeddings.c.model == model))
        .where(fingerprints.c.scope == print_.scope, *_is_kept(task))
        .order_by(tasks.c.id)
    )
    best: Repeats | None = None
    for some in rows.partitions(4096):
        usable = [row for row in some if len(row.vector) == len(vector)]
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


def _is_kept(task: int) -> tuple[Any, ...]:
    return (
        fingerprints.c.kept.is_(True),
        fingerprints.c.task_id != task,
        tasks.c.state.not_in([state.value for state in GONE]),
    )


def _near(conn: Connection, task: int, print_: Compared, threshold: float, *, kept: bool) -> list[tuple[float, Any]]:
    """Tasks whose questions are near, the nearest first; of equally near ones, the oldest."""
    where = _is_kept(task) if kept else (fingerprints.c.task_id != task,)
    rows = conn.execute(
        select(fingerprints.c.task_id, fingerprints.c.like, fingerprints.c.scope, fingerprints.c.words, tasks.c.key)
        .join(tasks, tasks.c.id == fingerprints.c.task_id)
        .where(
            fingerprints.c.task_id.in_(
                select(fingerprint_bands.c.task_id).where(fingerprint_bands.c.band.in_(print_.bands))
            ),
            *where,
        )
        .order_by(fingerprints.c.task_id)
    )
    found: list[tuple[float, Any]] = []
    for row in rows:
        share = likeness.likeness(print_.words, frozenset(array("I", row.words)))
        if row.scope == print_.scope and share >= threshold:
            found.append((round(share, 4), row))
    return sorted(found, key=lambda near: -near[0])


def _enter_bands(conn: Connection, task: int, print_: Compared) -> None:
    there = set(conn.execute(select(fingerprint_bands.c.band).where(fingerprint_bands.c.task_id == task)).scalars())
    rows = [{"band": band, "task_id": task} for band in dict.fromkeys(print_.bands) if band not in there]
    if rows:
        conn.execute(insert(fingerprint_bands), rows)


def note(conn: Connection, task: int, found: Repeats) -> None:
    """Write down which task a rejected one repeats."""
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


def free_repetitions(conn: Connection, originals: Sequence[int]) -> int:
    """Tasks that were rejected because they repeat one of these, which is rejected itself now: they are due again."""
    freed = 0
    for start in range(0, len(originals), CHUNK):
        rows = conn.execute(
            select(duplicates.c.task_id)
            .join(tasks, tasks.c.id == duplicates.c.task_id)
            .where(
                duplicates.c.original_id.in_(originals[start : start + CHUNK]),
                tasks.c.state == TaskState.REJECTED.value,
            )
            .order_by(duplicates.c.task_id)
        ).scalars()
        for task in rows.all():
            conn.execute(delete(duplicates).where(duplicates.c.task_id == task))
            freed += move(conn, task, TaskState.REJECTED, TaskState.PENDING, "what it repeated was rejected")
    return freed


def unknown(conn: Connection, threshold: float, limit: int) -> list[Row[Any]]:
    """Accepted tasks (id, payload) that were never compared, or with another threshold: deduplication came later."""
    compared = exists().where(fingerprints.c.task_id == tasks.c.id, fingerprints.c.threshold == threshold)
    return list(
        conn.execute(
            select(tasks.c.id, tasks.c.payload)
            .where(tasks.c.state.in_([state.value for state in DECIDED]), ~compared)
            .order_by(tasks.c.id)
            .limit(limit)
        )
    )


def take_in(conn: Connection, known: Iterable[tuple[int, Compared]], threshold: float) -> None:
    """Enter tasks that were accepted before, and keep them."""
    for task, print_ in known:
        enter(conn, task, print_, threshold)
        keep(conn, task, print_)


def kept_without_vector(conn: Connection, model: str, limit: int) -> list[Row[Any]]:
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


def vectors(conn: Connection, model: str, texts: Sequence[str]) -> dict[str, bytes]:
    """The embeddings of these texts as far as they were made."""
    found: dict[str, bytes] = {}
    for some in chunks(texts):
        rows = conn.execute(
            select(embeddings.c.text, embeddings.c.vector).where(
                embeddings.c.model == model, embeddings.c.text.in_(some)
            )
        )
        found |= {row.text: bytes(row.vector) for row in rows}
    return found


def store_vectors(conn: Connection, model: str, made: Mapping[str, bytes]) -> None:
    there = vectors(conn, model, list(made))
    rows = [{"model": model, "text": text, "vector": made[text]} for text in made if text not in there]
    if rows:
        conn.execute(insert(embeddings), rows)
