"""Embeddings of questions, stored once per text and model, and the nearest kept question by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, exists, func, insert, select

from flywheel.store.deduplication import GONE, Entry, Repeats, same_things, unpacked
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import embeddings, fingerprints, tasks


def nearest(conn: Connection, entry: Entry, threshold: float, model: str, vector: bytes) -> Repeats | None:
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
