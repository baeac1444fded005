"""Which stored tasks rounds leave out because another model answered, after the settings that say so were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, select, update

from flywheel import exclusion
from flywheel.exclusion import Exclusion, TrainedModels
from flywheel.store.pipeline_counts import note, noted
from flywheel.store.schema import replies, sources, tasks

_NOTE: Final = "model_rules"
_PAGE: Final = 1000


def applied(conn: Connection) -> str:
    """The digest of the settings that hold for all stored tasks."""
    return noted(conn, _NOTE)


def note_applied(conn: Connection, digest: str) -> None:
    note(conn, _NOTE, digest)


def apply(conn: Connection, models_of: Callable[[str], TrainedModels], after: int) -> int | None:
    """Look at some tasks behind `after` anew; the number of the last one, None if there are no more.

    `models_of` says by the path of a source whose replies are trained on. What one of several sources takes is taken.
    """
    some = select(tasks.c.id).where(tasks.c.id > after).order_by(tasks.c.id).limit(_PAGE).subquery()
    rows = conn.execute(
        select(tasks.c.id, tasks.c.model, tasks.c.adapter, tasks.c.excluded, sources.c.path)
        .join(some, some.c.id == tasks.c.id)
        .outerjoin(replies, replies.c.task_id == tasks.c.id)
        .outerjoin(sources, sources.c.id == replies.c.source_id)
        .order_by(tasks.c.id)
    ).all()
    known: dict[str, TrainedModels] = {}
    trained: dict[int, bool] = {}
    for row in rows:
        path = row.path or ""
        if path not in known:
            known[path] = models_of(path)
        trained[row.id] = trained.get(row.id, False) or known[path].trains(row.model, row.adapter)
    for row in {row.id: row for row in rows}.values():
        others = set(exclusion.parsed(row.excluded)) - {Exclusion.MODEL}
        now = exclusion.column(others if trained[row.id] else {*others, Exclusion.MODEL})
        if now != row.excluded:
            conn.execute(update(tasks).where(tasks.c.id == row.id).values(excluded=now))
    return rows[-1].id if rows else None
